"use strict";
// A plan: `zeroamp plan --json`, and the memory over a step.

const plan = DATA.plan, GIB = 2 ** 30;
// Of the kinds of memory, in their order.
const MEMORY = ["#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#F0E442", "#999999", "#8250df"];
const yes = (is) => (is ? "yes" : "no");
const stages = plan.stages.map((stage) => ({
  ...stage,
  mesh: [stage.num_replicas, stage.num_shards].filter((number) => number !== null).join("x"),
  fit: yes(stage.fits),
  sent: stage.traffic.reduce((sum, row) => sum + row.bytes, 0),
}));

function bytes(rows, key, label) {
  const unit = unitOf(rows.map((row) => row[key] ?? 0)), scaled = `${key} scaled`;
  for (const row of rows) row[scaled] = row[key] === null ? null : row[key] / unit.size;
  return { key: scaled, label: `${label}, ${unit.name}`, kind: "float" };
}
// A table whose column "fit" is coloured.
function addColoured(rows, columns) {
  const made = table(rows, columns), at = columns.findIndex(({ key }) => key === "fit");
  const colour = () => made.querySelectorAll("tbody tr").forEach((row) => {
    const cell = row.children[at];
    cell.style.color = cell.textContent === "yes" ? "#1a7f37" : "#cf222e";
    cell.style.fontWeight = "bold";
  });
  made.addEventListener("click", colour);  // sorting draws the rows again
  colour();
  add(made);
}

tiles([
  ["ranks", FORMS.int(plan.world_size)], ["batch x tokens per rank", `${plan.batch} x ${FORMS.int(plan.seq)}`],
  ["activation checkpointing", plan.checkpointing ? "on" : "off"],
  ["GPU", `${plan.gpu.name}, ${decimals(plan.gpu.memory_bytes / GIB)} GiB`],
  ["of the trainable elements in low precision", FORMS.percent(plan.low_share)],
]);
addColoured(stages, [{ key: "stage", label: "stage", kind: "int" }, { key: "mesh", label: "mesh" }, bytes(stages, "peak_bytes", "peak"),
  { key: "fit", label: "fits" }, { key: "largest_batch", label: "largest batch", kind: "int" }, bytes(stages, "sent", "communicated per step")]);
for (const [stage, reason] of Object.entries(plan.refused)) note(`Stage ${stage} is not possible: ${reason}`);

// Phases get short names: whole ones overlap.
function phases(stretches) {
  const numForwards = stretches.filter(({ name }) => name.endsWith("forward")).length;
  let micro = 0;
  return stretches.map(({ begin, name }, index) => {
    if (name.endsWith("forward")) micro += 1;
    const number = numForwards > 1 ? micro : "", end = stretches[index + 1]?.begin;
    return { begin, end, name: name.endsWith("forward") ? `F${number}` : name.endsWith("backward") ? `B${number}` : "opt", numForwards };
  });
}
const MICRO = { 2: ", 1 of the first micro-batch, 2 of the last", 3: ", 1 of the first micro-batch, 2 of one in the middle, 3 of the last" };

heading("Memory over one step");
note("Memory of the first rank, in the order of its allocations and frees. All stages have the same axis. The dashed line is the GPU's memory, where it is near.");
note(`F: forward, B: backward${MICRO[phases(DATA.timelines[0]?.stretches ?? [])[0]?.numForwards] ?? ""}. opt: optimizer.`);
const tops = DATA.timelines.map(({ total }) => Math.max(...total)), highest = Math.max(...tops), unit = unitOf([highest]);
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
for (const [index, timeline] of DATA.timelines.entries()) {
  const total = timeline.total, top = tops[index], at = total.indexOf(top), limit = plan.gpu.memory_bytes;
  const x = total.map((_, index) => index);
  const traces = timeline.kinds.map(({ kind, bytes }) => ({ type: "scatter", mode: "lines", name: kind, x, y: bytes.map((b) => b / unit.size),
    stackgroup: "memory", line: { width: 0, shape: "hv" }, fillcolor: MEMORY[labels.indexOf(kind) % MEMORY.length], hovertemplate: `%{y:.3~f} ${unit.name}`, showlegend: false }));
  const shapes = timeline.stretches.slice(1).map(({ begin }) => ({ type: "line", x0: begin, x1: begin, yref: "paper", y0: 0, y1: 1, line: { width: 1, color: "#8c959f" } }));
  if (limit <= 1.25 * highest) shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit / unit.size, y1: limit / unit.size, line: { dash: "dash", color: "#cf222e" } });
  const names = phases(timeline.stretches).map(({ begin, end, name }) => ({ x: (begin + (end ?? x.length - 1)) / 2, y: 1, yref: "paper", text: name,
    showarrow: false, xanchor: "center", yanchor: "top", font: { size: 11, color: theme("soft") } }));
  const peak = { x: at, y: top / unit.size, text: `peak ${decimals(top / unit.size)} ${unit.name}`, arrowhead: 2, arrowcolor: theme("ink"), ax: at > x.length / 2 ? -60 : 60, ay: -18, bgcolor: theme("paper") };
  chart(memory, traces, { title: titled(`Stage ${timeline.stage}`), shapes, annotations: [...names, peak],
    xaxis: below("allocations and frees, in order", { showticklabels: false, range: [0, x.length - 1] }), yaxis: axis(`${unit.name} on one rank`, { range: [0, (1.25 * highest) / unit.size] }) }, 400);
}

heading("Largest batch and traffic");
const bars = charts(), names = stages.map((stage) => `stage ${stage.stage}`), sentUnit = unitOf(stages.map(({ sent }) => sent));
const bar = (name, y, colour) => ({ type: "bar", name, x: names, y, marker: { color: colour } });
chart(bars, [bar("largest batch", stages.map((stage) => stage.largest_batch), COLOURS[0])],
  { title: titled("Samples per micro-batch and rank that fit"), yaxis: axis("samples", { rangemode: "tozero", tick0: 0, dtick: Math.ceil(Math.max(1, ...stages.map((stage) => stage.largest_batch)) / 6) }), hovermode: "closest" });
const kinds = [...new Set(stages.flatMap((stage) => stage.traffic.map((row) => `${row.collective} ${row.dtype}`)))].sort();
const sent = (stage, kind) => stage.traffic.filter((row) => `${row.collective} ${row.dtype}` === kind).reduce((total, row) => total + row.bytes, 0);
chart(bars, kinds.map((kind, index) => bar(kind, stages.map((stage) => sent(stage, kind) / sentUnit.size), COLOURS[index % COLOURS.length])),
  { barmode: "stack", title: titled("Communicated per step and rank"), yaxis: axis(sentUnit.name), legend: LEGEND });
