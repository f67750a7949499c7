"use strict";
// A plan: `zeroamp plan --json`, and the memory over a step.

const plan = DATA.plan;
// Of the kinds of memory, in their order.
const MEMORY = ["#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#F0E442", "#999999", "#8250df"];
const yes = (is) => (is ? "yes" : "no");
const stages = plan.stages.map((stage) => ({
  ...stage,
  replicas: stage.num_replicas ?? 1,
  fit: yes(stage.fits),
  sent: stage.traffic.reduce((sum, row) => sum + row.bytes, 0),
}));

tiles([
  ["ranks", FORMS.int(plan.world_size)], ...(plan.is_batched ? [["samples per rank and micro-batch", FORMS.int(plan.batch)]] : []), ...(plan.has_length ? [["tokens per sample", FORMS.int(plan.seq)]] : []),
  ["activation checkpointing", plan.checkpointing ? "on" : "off"],
  ["GPU", `${plan.gpu.name}, ${size(plan.gpu.memory_bytes)}`],
  ["of the trainable elements in low precision", FORMS.percent(plan.low_share)],
]);
add(table(stages, [{ key: "stage", label: "stage", kind: "int" }, { key: "num_shards", label: "shards", kind: "int" },
  { key: "replicas", label: "replicas", kind: "int" }, bytes(stages, "peak_bytes", "peak"), { key: "fit", label: "fits", kind: "fits" },
  ...(plan.is_batched ? [{ key: "largest_batch", label: "largest batch", kind: "int" }] : []), bytes(stages, "sent", "communicated per step")]));
for (const [stage, reason] of Object.entries(plan.refused)) note(`Stage ${stage} is not possible: ${reason}`);

// The names of phases are short where there are several forwards: whole ones overlap.
function phases(stretches) {
  const numForwards = stretches.filter(({ name }) => name.endsWith("forward")).length;
  let micro = 0;
  return stretches.map(({ begin, name }, index) => {
    if (name.endsWith("forward")) micro += 1;
    const word = ["forward", "backward"].find((each) => name.endsWith(each)) ?? "update";
    return { begin, end: stretches[index + 1]?.begin, numForwards,
      name: numForwards === 1 || word === "update" ? word : `${word[0].toUpperCase()}${micro}` };
  });
}
const MICRO = { 2: ", 1 of the first micro-batch, 2 of the last", 3: ", 1 of the first micro-batch, 2 of one in the middle, 3 of the last" };
// Stages whose memory is the same share a panel.
const panels = [];
for (const timeline of DATA.timelines) {
  const same = panels.find(({ timeline: { total, kinds } }) => JSON.stringify([total, kinds]) === JSON.stringify([timeline.total, timeline.kinds]));
  if (same) same.stages.push(timeline.stage);
  else panels.push({ timeline, stages: [timeline.stage] });
}

heading("Memory over one step");
note("Memory of the first rank, in the order of its allocations and frees. Each panel has its own axis. The dashed line is the GPU's memory, where it is near.");
const micro = MICRO[phases(DATA.timelines[0]?.stretches ?? [])[0]?.numForwards];
if (micro) note(`F: forward, B: backward${micro}.`);
const unit = unitOf(DATA.timelines.flatMap(({ total }) => total));
const drawn = DATA.timelines.flatMap(({ kinds }) => kinds).filter((kind) => Math.max(...kind.bytes) > 0).map(({ kind }) => kind);
const labels = [...new Set(DATA.timelines.flatMap(({ kinds }) => kinds.map(({ kind }) => kind)))];
const legend = element("p", { className: "legend" }, ...labels.flatMap((label, index) => {
  const square = element("span", { textContent: "■ " }), entry = element("span", {}, square, label);
  square.style.color = MEMORY[index % MEMORY.length];
  entry.style.whiteSpace = "nowrap";
  return drawn.includes(label) ? [entry, "  "] : [];
}));
add(legend);
const memory = charts();
for (const { timeline, stages: [...of] } of panels) {
  const total = timeline.total, top = Math.max(...total), at = total.indexOf(top), limit = plan.gpu.memory_bytes;
  const x = total.map((_, index) => index);
  const traces = timeline.kinds.map(({ kind, bytes }) => ({ type: "scatter", mode: "lines", name: kind, x, y: bytes.map((b) => b / unit.size),
    stackgroup: "memory", line: { width: 0, shape: "hv" }, fillcolor: MEMORY[labels.indexOf(kind) % MEMORY.length], hovertemplate: `%{y:.3~f} ${unit.name}`, showlegend: false }));
  const shapes = timeline.stretches.slice(1).map(({ begin }) => ({ type: "line", x0: begin, x1: begin, yref: "paper", y0: 0, y1: 1, line: { width: 1, color: "#8c959f" } }));
  if (limit <= 1.25 * top) shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit / unit.size, y1: limit / unit.size, line: { dash: "dash", color: "#cf222e" } });
  const names = phases(timeline.stretches).map(({ begin, end, name }) => ({ x: (begin + (end ?? x.length - 1)) / 2, y: 1, yref: "paper", text: name,
    showarrow: false, xanchor: "center", yanchor: "top", font: { size: 11, color: theme("soft") } }));
  const peak = { x: at, y: top / unit.size, text: `peak ${decimals(top / unit.size)} ${unit.name}`, arrowhead: 2, arrowcolor: theme("ink"), ax: at > x.length / 2 ? -60 : 60, ay: -18, bgcolor: theme("paper") };
  chart(memory, traces, { title: titled(of.length > 1 ? `Stages ${of.join(" and ")}` : `Stage ${of[0]}`), shapes, annotations: [...names, peak],
    xaxis: below("allocations and frees, in order", { showticklabels: false, range: [0, x.length - 1] }), yaxis: axis(`${unit.name} on one rank`, { range: [0, (1.25 * top) / unit.size] }) }, 400);
}

fillLastRow(memory);

heading(plan.is_batched ? "Largest batch and traffic" : "Traffic");
const bars = charts(), names = stages.map((stage) => `stage ${stage.stage}`), sentUnit = unitOf(stages.map(({ sent }) => sent));
if (plan.is_batched) {
  const most = Math.max(1, ...stages.map((stage) => stage.largest_batch));
  chart(bars, [{ type: "bar", x: names, y: stages.map((stage) => stage.largest_batch), marker: { color: COLOURS[0] } }],
    { title: titled("Samples per micro-batch and rank that fit"), yaxis: axis("samples", { rangemode: "tozero", tick0: 0, dtick: Math.ceil(most / 6) }), hovermode: "closest" });
}
// Colours are those of the dtypes, as on the page of the ledger; patterns tell the collectives.
const PATTERNS = { all_gather: "", reduce_scatter: "/", all_to_all: "/", all_reduce: "x" };
const sent = (stage, kind) => stage.traffic.filter((row) => `${row.collective} ${row.dtype}` === kind).reduce((total, row) => total + row.bytes, 0);
const most = Math.max(...stages.map((stage) => stage.sent));
const all = [...new Set(stages.flatMap((stage) => stage.traffic.map((row) => `${row.collective} ${row.dtype}`)))].sort();
const kinds = all.filter((kind) => stages.some((stage) => sent(stage, kind) > most / 200));
chart(bars, kinds.map((kind) => {
  const [collective, dtype] = kind.split(" ");
  return { type: "bar", name: kind, x: names, y: stages.map((stage) => sent(stage, kind) / sentUnit.size),
    marker: { color: DTYPES[dtype] ?? OTHER, pattern: { shape: PATTERNS[collective] ?? ".", fillmode: "overlay", fgcolor: theme("paper"), fgopacity: 0.6 } } };
}), { barmode: "stack", title: titled("Communicated per step and rank"), legend: { ...LEGEND, y: -0.15 },
  yaxis: axis(sentUnit.name, { range: [0, (1.1 * most) / sentUnit.size] }) });
if (kinds.length < all.length) note("Collectives below 0.5% of the largest sum are not drawn.");
