"use strict";
// Runs side by side: what RunReport wrote. With `zeroamp report --serve` the page reads the files again every few seconds.

const SECONDS = 3;
const number = (value) => (typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value ?? null);
const GB = (bytes) => Object.values(bytes).reduce((sum, value) => sum + value, 0) / 1e9;
const PANELS = [
  ["loss", "loss", (r) => (r.skipped ? null : number(r.loss))],
  ["gradient norm before clipping", "norm", (r) => (r.skipped ? null : number(r.grad_norm))],
  ["tokens/s", "tokens/s", (r) => r.tokens_per_s],
  ["time of a step", "ms", (r) => 1e3 * r.step_s],
  ["peak active memory on the device", "GiB", (r) => r.peak_active_gib],
  ["peak memory of the process", "GiB", (r) => r.peak_rss_gib],
  ["communicated per step", "GB", (r) => GB(r.traffic_bytes)],
  ["learning rate of the first group", "lr", (r) => r.lr[0] ?? null],
  ["loss scale", "scale", (r) => (r.loss_scale === 1 ? null : r.loss_scale)],
];
const PARTS = ["forward", "backward", "exposed_communication", "optimizer", "other"];
let drawn = [];
let isSyncing = false;

function traces(data, value) {
  return data.runs.map((run, index) => ({ type: "scatter", mode: run.records.length > 1 ? "lines" : "markers", name: text(run.name),
    x: run.records.map((record) => record.step), y: run.records.map(value), line: { width: 1.6, color: COLOURS[index % COLOURS.length] },
    marker: { color: COLOURS[index % COLOURS.length] }, connectgaps: false }));
}

function draw(data) {
  page().replaceChildren();
  drawn = [];
  tiles(data.runs.map((run) => [`${run.name}: steps`, FORMS.int(run.records.filter((record) => !record.skipped).length)]));
  heading("Side by side");
  add(table(data.summary, Object.keys(data.summary[0] ?? {}).map((key) => ({ key, label: key, kind: key === "" ? "text" : "" }))));
  heading("Over the steps");
  note("Drag to zoom; all panels follow. Double-click to zoom out. A click on a run's name hides it.");
  const parent = charts();
  for (const [title, unit, value] of PANELS) {
    const lines = traces(data, value);
    if (lines.some((line) => line.y.some((y) => y !== null && y !== undefined))) {
      const made = chart(parent, lines, { title: titled(title), xaxis: below("optimizer step"), yaxis: axis(unit, unit === "GiB" ? { rangemode: "tozero" } : {}),
        showlegend: true, legend: LEGEND });
      made.on("plotly_relayout", (change) => follow(made, change));
      drawn.push({ made, value });
    }
  }
  heading("Where the time goes");
  const names = data.runs.map((run) => text(run.name));
  const mean = (run, part) => run.records.reduce((sum, record) => sum + seconds(record, part), 0) / Math.max(1, run.records.length);
  chart(charts(), PARTS.map((part, index) => ({ type: "bar", orientation: "h", name: part.replace("_", " "), y: names,
    x: data.runs.map((run) => 1e3 * mean(run, part)), marker: { color: COLOURS[index] } })),
    { barmode: "stack", title: titled("Mean of all steps"), xaxis: axis("ms per step"), legend: { ...LEGEND, y: -0.35 }, hovermode: "closest" }, 190 + 50 * names.length, "wide");
  const warned = data.runs.flatMap((run) => run.warnings.map((warning) => `${run.name}: ${warning.name}: ${warning.text}`));
  if (warned.length) {
    heading("Warnings");
    add(...warned.map((text) => element("div", { className: "warning", textContent: text })));
  }
}

function seconds(record, part) {
  if (part !== "other") return record[`${part}_s`];
  return record.step_s - PARTS.slice(0, -1).reduce((sum, each) => sum + record[`${each}_s`], 0);
}

function follow(source, change) {
  if (isSyncing) return;
  const range = change["xaxis.range[0]"] !== undefined ? { "xaxis.range": [change["xaxis.range[0]"], change["xaxis.range[1]"]] }
    : change["xaxis.autorange"] ? { "xaxis.autorange": true } : null;
  if (range === null) return;
  isSyncing = true;
  Promise.all(drawn.filter(({ made }) => made !== source).map(({ made }) => Plotly.relayout(made, range))).finally(() => { isSyncing = false; });
}

function refresh(data) {
  for (const { made, value } of drawn) Plotly.react(made, traces(data, value), made.layout, CHART);
}

draw(DATA);
if (document.body.dataset.live === "true") {
  let last = JSON.stringify(DATA);
  const status = element("p", { textContent: "live" });
  document.querySelector("header").append(status);
  setInterval(async () => {
    try {
      const text = await (await fetch("data.json", { cache: "no-store" })).text();
      const now = new Date().toLocaleTimeString();
      status.textContent = `live: read ${now}`;
      if (text === last) return;
      const data = JSON.parse(text), isNew = drawn.length === 0 || data.runs.some((run, index) => run.records.length === 0 || drawn[0].made.data.length !== data.runs.length);
      last = text;
      if (isNew) draw(data); else refresh(data);
    } catch { status.textContent = "live: the server has ended"; }
  }, 1e3 * SECONDS);
}
