"use strict";
// What low precision of groups of modules changes: `zeroamp sensitivity --json`. A change that is not finite is null.

const LOW = DATA.low, change = (value) => (value === null ? "not finite" : decimals(value, 2));
tiles([["noise of the gradient", change(DATA.noise)], [`all groups in ${LOW}`, change(DATA.low_change)],
  ["as the config has it", change(DATA.config_change)],
  ...(DATA.recommended_change === null ? [] : [["as recommended", change(DATA.recommended_change)]])]);
note(DATA.advice);
if (Object.keys(DATA.recommended).length) add(element("pre", { textContent: JSON.stringify(DATA.recommended, null, 2) }));

// The depth of a parameter is the first number in its name, its role the rest. Of equal roles, as those of experts,
// the largest change is shown.
const depths = new Map(), roles = new Set();
for (const [fqn, value] of Object.entries(DATA.parameter_changes)) {
  const parts = fqn.split("."), at = parts.findIndex((part) => /^\d+$/.test(part));
  if (at < 0) continue;
  const role = parts.map((part, index) => (index === at ? "" : /^\d+$/.test(part) ? "*" : part)).slice(at + 1).join(".");
  const stack = parts.slice(0, at).join("."), depth = `${stack} ${parts[at]}`;
  if (!depths.has(depth)) depths.set(depth, { stack, number: parts[at], of: {} });
  const { of } = depths.get(depth);
  of[role] = role in of && (of[role] === null || value === null) ? null : Math.max(of[role] ?? 0, value ?? Infinity);
  if (of[role] === Infinity) of[role] = null;
  roles.add(role);
}
if (depths.size > 1) {
  heading("Depth and role");
  note(`Change of each parameter's own gradient, with all groups in ${LOW}. A column is a block. Empty: no such parameter, or not finite.`);
  const stacks = new Set([...depths.values()].map(({ stack }) => stack)), columns = [...depths.values()];
  const names = columns.map(({ stack, number }) => (stacks.size > 1 ? `${stack}.${number}` : number)), rows = [...roles];
  chart(charts(), [{ type: "heatmap", x: names, y: rows.map(text), z: rows.map((role) => columns.map(({ of }) => of[role] ?? null)),
    colorscale: "Cividis", colorbar: { thickness: 12 }, hovertemplate: "%{y}, block %{x}: %{z:.2g}<extra></extra>", xgap: 1, ygap: 1 }],
    { title: titled("Change of the own gradient"), hovermode: "closest", xaxis: below("block", { type: "category" }),
      yaxis: axis("", { type: "category", autorange: "reversed", tickfont: { size: IS_NARROW ? 9 : 11 } }) }, 130 + 22 * rows.length, "wide");
}

heading("Bytes in fp32 against error");
note(`Each point is a run: the groups of its label in fp32, all others in ${LOW}. To the right, an all-gather has more bytes. The line joins the best for their bytes.`);
const runs = DATA.choices.filter((each) => each.gradient_change !== null).sort((a, b) => a.bytes - b.bytes || a.gradient_change - b.gradient_change);
const unit = unitOf(runs.map((each) => each.bytes));
const best = runs.filter((each, index) => runs.slice(0, index).every((other) => other.gradient_change > each.gradient_change));
const points = (of, more) => ({ type: "scatter", x: of.map((each) => each.bytes / unit.size), y: of.map((each) => each.gradient_change),
  text: of.map((each) => text(each.in_fp32.join(", ") || "none")), hovertemplate: "%{text}: %{y:.2g}<extra></extra>", showlegend: false, ...more });
const limits = runs.some((each) => DATA.noise !== null && DATA.noise <= 1.25 * each.gradient_change)
  ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: DATA.noise, y1: DATA.noise, line: { dash: "dash", color: COLOURS[1] } }] : [];
chart(charts(), [points(best, { mode: "lines", line: { shape: "hv", color: COLOURS[0] }, hoverinfo: "skip", hovertemplate: null }),
  points(runs, { mode: "markers", marker: { color: COLOURS[0], size: 8 } })],
  { title: titled("Change of the whole gradient"), hovermode: "closest", shapes: limits, xaxis: below(`${unit.name} more in one all-gather`, { rangemode: "tozero" }),
    yaxis: axis("", { rangemode: "tozero" }) }, 340, "wide");
if (limits.length) note("The dashed line is the noise.");

heading("Groups");
const columns = [["loss_change", "loss"], ["gradient_change", "gradient"], ["own_gradient_change", "own gradient"],
  ["gradient_change_of_others", "others"], ["overflow", "overflow"], ["underflow", "underflow"]];
for (const row of DATA.rows) Object.assign(row, { num_modules: row.modules.length, gflops: row.flops_saved / 1e9 });
add(table(DATA.rows, [{ key: "group", label: "group", kind: "name" }, { key: "num_modules", label: "modules", kind: "int" },
  ...columns.filter(([key]) => key in DATA.rows[0]).map(([key, label]) => ({ key, label, kind: "float" })),
  bytes(DATA.rows, "bytes_saved", "bytes saved"), { key: "gflops", label: "GFLOPs", kind: "float" }], { search: ["group"] }));
heading("Parameters");
add(table(Object.entries(DATA.parameter_changes).map(([name, value]) => ({ name, value })),
  [{ key: "name", label: "parameter", kind: "name" }, { key: "value", label: `change with all groups in ${LOW}`, kind: "float" }], { search: ["name"] }));
