"use strict";
// A plan: `zeroamp plan --json`, and the memory over a step.

const plan = DATA.plan, GIB = 2 ** 30;
// Of the kinds of memory, in their order, as in plan.png.
const MEMORY = ["#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#F0E442", "#999999", "#000000"];
const stages = plan.stages.map((stage) => ({
  ...stage,
  mesh: [stage.num_replicas, stage.num_shards].filter((number) => number !== null).join("x"),
  with_nccl: stage.peak_bytes + stage.nccl_bytes,
  fit: stage.fits ? "yes" : "no",
  sent: stage.traffic.reduce((sum, row) => sum + row.bytes, 0),
  step: stage.seconds.total, compute: stage.seconds.compute, network: stage.seconds.communication,
  latency: stage.seconds.latency, exposed: stage.seconds.exposed_communication, tflops: stage.flops / stage.seconds.total / 1e12,
}));

tiles([
  ["ranks", FORMS.int(plan.world_size)], ["batch x tokens per rank", `${plan.batch} x ${FORMS.int(plan.seq)}`],
  ["activation checkpointing", plan.checkpointing ? "on" : "off"],
  ["GPU", `${plan.gpu.name}, ${decimals(plan.gpu.memory_bytes / GIB)} GiB`],
  ["of the trainable elements in low precision", FORMS.percent(plan.low_share)],
]);
const other = plan.checkpointing ? "GiB without checkpointing" : "GiB with checkpointing";
add(table(stages, [{ key: "stage", label: "stage", kind: "int" }, { key: "mesh", label: "mesh" },
  { key: "peak_bytes", label: "peak GiB", kind: "gib" }, { key: "nccl_bytes", label: "NCCL GiB", kind: "gib" },
  { key: "peak_bytes_with_other_checkpointing", label: other, kind: "gib" }, { key: "fit", label: "fits" },
  { key: "largest_batch", label: "largest batch", kind: "int" }, { key: "sent", label: "GB per step", kind: "gb" },
  { key: "step", label: "step s", kind: "float" }, { key: "compute", label: "compute s", kind: "float" },
  { key: "network", label: "network s", kind: "float" }, { key: "latency", label: "latency s", kind: "float" },
  { key: "exposed", label: "exposed s", kind: "float" }, { key: "tflops", label: "TFLOP/s per GPU", kind: "float" }]));
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
note("Memory of the first rank, in the order of its allocations and frees. Each stage has its own axis. The dashed line is the GPU's memory, where it is near.");
note(`F: forward, B: backward${MICRO[phases(DATA.timelines[0]?.stretches ?? [])[0]?.numForwards] ?? ""}. opt: optimizer.`);
const memory = charts();
for (const timeline of DATA.timelines) {
  const total = timeline.total, top = Math.max(...total), at = total.indexOf(top), limit = plan.gpu.memory_bytes;
  const x = total.map((_, index) => index);
  const traces = timeline.kinds.map(({ label, bytes }, index) => ({ type: "scatter", mode: "lines", name: label, x, y: bytes.map((b) => b / GIB),
    stackgroup: "memory", line: { width: 0, shape: "hv" }, fillcolor: MEMORY[index % MEMORY.length], hovertemplate: "%{y:.3~f} GiB", showlegend: Math.max(...bytes) > 0 }));
  const shapes = timeline.stretches.slice(1).map(({ begin }) => ({ type: "line", x0: begin, x1: begin, yref: "paper", y0: 0, y1: 1, line: { width: 1, color: "#8c959f" } }));
  if (limit <= 1.25 * top) shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit / GIB, y1: limit / GIB, line: { dash: "dash", color: "#cf222e" } });
  const names = phases(timeline.stretches).map(({ begin, end, name }) => ({ x: (begin + (end ?? x.length - 1)) / 2, y: 1, yref: "paper", text: name,
    showarrow: false, xanchor: "center", yanchor: "top", font: { size: 11, color: theme("soft") } }));
  const peak = { x: at, y: top / GIB, text: `peak ${decimals(top / GIB)} GiB`, arrowhead: 2, ax: at > x.length / 2 ? -60 : 60, ay: -18, bgcolor: theme("paper") };
  chart(memory, traces, { title: titled(`Stage ${timeline.stage}`), shapes, annotations: [...names, peak],
    xaxis: below("allocations and frees, in order", { showticklabels: false, range: [0, x.length - 1] }), yaxis: axis("GiB on one rank", { range: [0, (1.25 * top) / GIB] }),
    legend: LEGEND }, 460);
}

heading("Largest batch, time and traffic");
const bars = charts();
const labels = stages.map((stage) => `stage ${stage.stage}`);
const bar = (name, y, colour) => ({ type: "bar", name, x: labels, y, marker: { color: colour } });
chart(bars, [bar("largest batch", stages.map((stage) => stage.largest_batch), COLOURS[0])],
  { title: titled("Samples per micro-batch and rank that fit"), yaxis: axis("samples"), hovermode: "closest" });
const parts = [["compute", "compute"], ["optimizer", "optimizer"], ["exposed_communication", "exposed communication"]];
chart(bars, parts.map(([key, name], index) => bar(name, stages.map((stage) => stage.seconds[key]), COLOURS[index])),
  { barmode: "stack", title: titled("Time of a step"), yaxis: axis("s"), legend: LEGEND });
const kinds = [...new Set(stages.flatMap((stage) => stage.traffic.map((row) => `${row.collective} ${row.dtype}`)))].sort();
const sent = (stage, kind) => stage.traffic.filter((row) => `${row.collective} ${row.dtype}` === kind).reduce((total, row) => total + row.bytes, 0);
chart(bars, kinds.map((kind, index) => bar(kind, stages.map((stage) => sent(stage, kind) / 1e9), COLOURS[index % COLOURS.length])),
  { barmode: "stack", title: titled("Communicated per step and rank"), yaxis: axis("GB"), legend: LEGEND });

if (plan.meshes) {
  heading("Meshes");
  const tried = plan.meshes.tried.map((mesh) => ({ ...mesh, name: `${mesh.num_replicas}x${mesh.num_shards}` +
    (mesh.partition > 1 ? ` hpZ ${mesh.partition}` : "") + (mesh.ranks_per_node ? " two levels" : ""), fit: mesh.fits ? "yes" : "no",
    step: mesh.seconds.total, network: mesh.seconds.communication, latency: mesh.seconds.latency, exposed: mesh.seconds.exposed_communication }));
  const best = tried.find((mesh) => JSON.stringify(plan.meshes.tried[tried.indexOf(mesh)]) === JSON.stringify(plan.meshes.best));
  note(`Replicas x shards. Best: ${best.name}: ${plan.meshes.reason}.`);
  const pair = charts(), x = tried.map((mesh) => mesh.name), colours = tried.map((mesh) => (mesh === best ? "#1a7f37" : COLOURS[5]));
  const meshBars = (title, unit, y) => chart(pair, [{ type: "bar", x, y, marker: { color: colours } }],
    { title: titled(title), yaxis: axis(unit), hovermode: "closest" });
  meshBars("Time of a step", "s", tried.map((mesh) => mesh.step));
  meshBars("Peak with NCCL", "GiB", tried.map((mesh) => mesh.peak_bytes / GIB));
  add(table(tried, [{ key: "name", label: "mesh", kind: "name" }, { key: "peak_bytes", label: "peak GiB", kind: "gib" }, { key: "fit", label: "fits" },
    { key: "step", label: "step s", kind: "float" }, { key: "network", label: "network s", kind: "float" }, { key: "latency", label: "latency s", kind: "float" },
    { key: "exposed", label: "exposed s", kind: "float" }, { key: "padding", label: "padding", kind: "percent" }], { isBest: (mesh) => mesh === best }));
}

heading("Groups");
const shownStage = stages.find((stage) => stage.stage === plan.config.zero_optimization?.stage) ?? stages[0];
note(`Stage ${shownStage.stage}, on one rank.`);
add(table(shownStage.groups, [{ key: "group", label: "group", kind: "name" }, { key: "kind", label: "kind" }, { key: "elements", label: "elements", kind: "int" },
  { key: "param", label: "param", kind: "dtype" }, { key: "communication", label: "communication", kind: "dtype" },
  { key: "stored_bytes_per_rank", label: "GiB of shards", kind: "gib" }, { key: "unsharded_bytes_per_rank", label: "GiB unsharded", kind: "gib" },
  { key: "gradient_bytes_per_rank", label: "GiB of gradients", kind: "gib" }], { search: ["group", "kind"] }));
note(`Efficiency: ${plan.efficiency.origin}. GPU: ${plan.gpu.source}.`);
