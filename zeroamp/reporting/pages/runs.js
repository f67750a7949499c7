"use strict";
// Runs side by side: what RunReport wrote.

const number = (value) => (typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value ?? null);
const communicated = (record) => Object.values(record.traffic_bytes).reduce((sum, value) => sum + value, 0);
const UNIT = unitOf(DATA.runs.flatMap((run) => run.records.map(communicated)));
const MEMORY = unitOf(DATA.runs.flatMap((run) => run.records.map((r) => 2 ** 30 * Math.max(r.peak_rss_gib, r.peak_active_gib ?? 0))));
const memory = (gib) => (gib === null || gib === undefined ? null : (gib * 2 ** 30) / MEMORY.size);
const PANELS = [
  ["loss", "loss", (r) => (r.skipped ? null : number(r.loss))],
  ["gradient norm before clipping", "norm", (r) => (r.skipped ? null : number(r.grad_norm))],
  ["tokens/s", "tokens/s", (r) => r.tokens_per_s],
  ["time of a step", "ms", (r) => 1e3 * r.step_s],
  ["peak active memory on the device", MEMORY.name, (r) => memory(r.peak_active_gib)],
  ["peak memory of the process", MEMORY.name, (r) => memory(r.peak_rss_gib)],
  ["communicated per step", UNIT.name, (r) => communicated(r) / UNIT.size],
  ["learning rate of the first group", "lr", (r) => r.lr[0] ?? null],
  ["loss scale", "scale", (r) => (r.loss_scale === 1 ? null : r.loss_scale)],
];
const PARTS = ["forward", "backward", "exposed_communication", "optimizer", "other"];
const drawn = [];
let isSyncing = false;

// The mean of the values around each, weighted like an exponential moving average without a lag at the start.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return value ?? null;
    [sum, total] = [weight * sum + value, weight * total + 1];
    return sum / total;
  });
}

function traces(data, value, weight = 0) {
  return data.runs.map((run, index) => ({ type: "scatter", mode: run.records.length > 1 ? "lines" : "markers", name: text(run.name),
    x: run.records.map((record) => record.step), y: smoothed(run.records.map(value), weight), line: { width: 1.6 + Math.max(0, 2.4 - 1.6 * index) * (data.runs.length > 1), color: COLOURS[index % COLOURS.length] },
    marker: { color: COLOURS[index % COLOURS.length] }, connectgaps: false }));
}

tiles(DATA.runs.map((run) => [DATA.runs.length > 1 ? `steps of ${run.name}` : "steps", FORMS.int(run.records.filter((record) => !record.skipped).length)]));
heading(DATA.runs.length > 1 ? "Side by side" : "Summary");
add(table(DATA.summary, Object.keys(DATA.summary[0] ?? {}).map((key) => ({ key, label: key, kind: key === "" ? "text" : "" }))));
if (DATA.runs.length > 1) {
  heading("Settings that differ");
  if (DATA.differences.length) add(table(DATA.differences, Object.keys(DATA.differences[0]).map((key) => ({ key, label: key, kind: key === "" ? "name" : "" }))));
  else note("None: config, optimizers, learning rates, versions, ranks and devices are the same in all runs.");
}

heading("Over the steps");
note(`Drag to zoom; all panels follow. Double-click to zoom out.${DATA.runs.length > 1 ? " A click on a run's name hides it." : ""}`);
const smoothing = element("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", ariaLabel: "Smoothing" });
const log = element("input", { type: "checkbox" });
smoothing.addEventListener("input", () => {
  for (const { made, value } of drawn) Plotly.restyle(made, { y: traces(DATA, value, Number(smoothing.value)).map((line) => line.y) });
});
log.addEventListener("change", () => {
  for (const { made } of drawn) Plotly.relayout(made, { "yaxis.type": log.checked ? "log" : "linear", "yaxis.autorange": true });
});
add(element("div", { className: "controls" }, element("label", {}, "smoothing", smoothing), element("label", {}, log, "log axis")));
const panels = charts();
for (const [title, unit, value] of PANELS) {
  const lines = traces(DATA, value);
  if (lines.some((line) => line.y.some((y) => y !== null && y !== undefined))) {
    const values = new Set(lines.flatMap((line) => line.y.filter((y) => y !== null && y !== undefined)));
    const fromZero = values.size === 1 || unit === MEMORY.name || unit === UNIT.name ? { rangemode: "tozero" } : {};
    const made = chart(panels, lines, { title: titled(title), xaxis: below("optimizer step"), yaxis: axis(unit, fromZero),
      showlegend: lines.length > 1, legend: LEGEND });
    made.on("plotly_relayout", (change) => follow(made, change));
    drawn.push({ made, value });
  }
}

fillLastRow(panels);

heading("Where the time goes");
const names = DATA.runs.map((run) => text(run.name));
const steady = (run) => (run.records.length > 1 ? run.records.slice(1) : run.records);
const mean = (run, part) => steady(run).reduce((sum, record) => sum + seconds(record, part), 0) / Math.max(1, steady(run).length);
chart(charts(), PARTS.map((part, index) => ({ type: "bar", orientation: "h", name: part.replace("_", " "), y: names,
  x: DATA.runs.map((run) => 1e3 * mean(run, part)), marker: { color: COLOURS[index] } })),
  { barmode: "stack", title: titled("Mean of the steps after the first, ms"), xaxis: axis(""), yaxis: axis("", { autorange: "reversed" }),
    legend: { ...LEGEND, y: -0.25, traceorder: "normal" }, hovermode: "closest" }, 190 + 50 * names.length, "wide");

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
