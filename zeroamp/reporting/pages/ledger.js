"use strict";
// The dtype ledger: `zeroamp explain --json`.

const COLUMNS = [["stored", "stored"], ["param", "param dtype (all-gather)"], ["compute", "compute"], ["gradient", "raw gradient"],
  ["communication", "communication"], ["accumulate", "accumulation"], ["optimizer", "optimizer state"]];
const rows = DATA.parameters;
const elements = rows.reduce((sum, row) => sum + row.elements, 0);

tiles([
  ["units below the root", FORMS.int(DATA.units.length)],
  ["groups", FORMS.int(DATA.groups.length)],
  ["parameters", FORMS.int(rows.length)],
  ["elements", FORMS.int(elements)],
  ["of the trainable elements in low precision", FORMS.percent(DATA.low_share)],
  ["all-gathered per step and rank", size(sum("all_gathered_bytes_per_step"))],
  ["reduced per step and rank", size(sum("reduced_bytes_per_step"))],
]);

function sum(key) {
  return rows.some((row) => row[key] === null) ? null : rows.reduce((total, row) => total + row[key], 0);
}

heading("Units");
note("Each box is an FSDP unit, with its parameters inside; its area is its number of elements. Boxes are in the order of the model. Click a unit to enter it.");
const choice = element("select", { ariaLabel: "Dtype that colours the units", onchange: draw },
  ...COLUMNS.map(([key, label]) => element("option", { value: key, textContent: `coloured by ${label}` })));
const legend = element("div", { className: "legend" });
choice.value = "param";
add(element("div", { className: "controls" }, choice), legend);
const picture = element("div", { className: "chart", id: "units" });
picture.style.height = "min(62vh, 560px)";
add(picture);

function draw() {
  const key = choice.value;
  const units = new Map();
  for (const row of rows) units.set(row.unit, [...(units.get(row.unit) ?? []), row]);
  const node = { ids: [], labels: [], parents: [], values: [], colours: [], hover: [] };
  const put = (id, label, parent, value, colour, hover) => {
    node.ids.push(id); node.labels.push(label); node.parents.push(parent); node.values.push(value);
    node.colours.push(colour); node.hover.push(hover);
  };
  const colour = (dtype) => DTYPES[dtype] ?? OTHER;
  put("model", "model", "", elements, theme("back"), `${FORMS.int(elements)} elements`);
  for (const [unit, members] of units) {
    const total = members.reduce((part, row) => part + row.elements, 0), shares = share(members, key);
    const parts = shares.map(([dtype, part]) => `${dtype ?? "–"}: ${FORMS.int(part)}`).join("<br>");
    put(`unit ${unit}`, unit, "model", total, colour(shares[0][0]), `unit ${text(unit)}<br>${FORMS.int(total)} elements<br>${parts}`);
    for (const row of members) {
      const label = row.parameter.startsWith(`${unit}.`) ? row.parameter.slice(unit.length + 1) : row.parameter;
      const dtypes = COLUMNS.map(([column, name]) => `${name}: ${row[column] ?? "–"}`).join("<br>");
      put(`parameter ${row.parameter}`, label, `unit ${unit}`, row.elements, colour(row[key]),
        `${text(row.parameter)}<br>[${row.shape.join(", ")}] ${text(row.class)}<br>${dtypes}<br>${text(row.why)}`);
    }
  }
  Plotly.react(picture, [{ type: "treemap", ids: node.ids, labels: node.labels.map(text), parents: node.parents, values: node.values,
    branchvalues: "total", sort: false, maxdepth: rows.length > 1500 ? 2 : 3, tiling: { packing: "binary" }, pathbar: { thickness: 22 },
    marker: { colors: node.colours, line: { width: 1, color: theme("paper") }, pad: { t: 18, l: 2, r: 2, b: 2 } },
    customdata: node.hover, hovertemplate: "%{customdata}<extra></extra>", textinfo: "label" }],
    { margin: { l: 4, r: 4, t: 4, b: 4 }, uniformtext: { minsize: 10, mode: "hide" }, ...colours() }, { ...CHART, displayModeBar: false });
  legend.replaceChildren(...share(rows, key).map(([dtype, part]) =>
    element("span", {}, dtypeChip(dtype), ` ${FORMS.int(part)} elements, ${FORMS.percent(part / elements)}`)));
}

function share(members, key) {
  const parts = new Map();
  for (const row of members) parts.set(row[key], (parts.get(row[key]) ?? 0) + row.elements);
  return [...parts].sort((a, b) => b[1] - a[1]);
}

draw();

heading("Dtypes between ranks");
add(table(DATA.summary, [
  { key: "param", label: "all-gathered in", kind: "dtype" }, { key: "communication", label: "reduced in", kind: "dtype" },
  { key: "params", label: "parameters", kind: "int" }, { key: "elements", label: "elements", kind: "int" },
  bytes(DATA.summary, "bytes_per_all_gather", "per all-gather"),
  bytes(DATA.summary, "all_gathered_bytes_per_step", "all-gathered per step"),
  bytes(DATA.summary, "reduced_bytes_per_step", "reduced per step")]));

const BYTES = [["all_gathered_bytes_per_step", "all-gathered", "All-gathered per step and rank"],
  ["reduced_bytes_per_step", "reduced", "Reduced per step and rank"], ["stored_bytes_per_rank", "shards", "Shards per rank"],
  ["unsharded_bytes_per_rank", "unsharded", "Unsharded per rank"], ["gradient_bytes_per_rank", "gradients", "Gradients per rank"]];
const bytesOf = (all) => BYTES.map(([key, label, hint]) => bytes(all, key, label, { hint }));
const DTYPE_COLUMNS = COLUMNS.map(([key, hint]) => ({ key, label: key, kind: "dtype", hint }));

// Equal layers share a row, as in the terminal: names that differ in one number only, in the order of the model.
const SHARED = [...COLUMNS.map(([key]) => key), "class", "why", ...BYTES.map(([key]) => key), "elements"];
function folded(all, name) {
  const found = new Map();
  for (const row of all) {
    const like = row[name].replace(/(^|\.)\d+(?=\.|$)/, "$1*");
    const same = JSON.stringify([like, row.kind, ...SHARED.map((key) => String(row[key]).replace(row[name], "").replace(/\.\d+(?=\.|\b)/, ".*"))]);
    found.set(same, [...(found.get(same) ?? []), row]);
  }
  return [...found.values()].map((equal) => ({ ...equal[0], count: equal.length,
    [name]: range(equal[0][name], equal.at(-1)[name]), why: range(equal[0].why ?? "", equal.at(-1).why ?? ""),
    names: equal.map((row) => [row[name], ...(row.aliases ?? []), row.unit ?? ""].join(" ")).join(" ") }));
}

// layers.0.norm and layers.31.norm: layers.0…31.norm
function range(first, last) {
  const ends = last.split(".");
  return first.split(".").map((part, index) => (part === ends[index] ? part : `${part}…${ends[index]}`)).join(".");
}

// A table with a choice between folded rows and all rows.
function foldable(title, text, all, name, columns, options) {
  heading(title);
  note(text);
  const few = folded(all, name), place = element("div");
  const count = { key: "count", label: "rows", kind: "int", hint: "How many equal rows this row stands for" };
  const show = (isFolded) => place.replaceChildren(table(isFolded ? few : all,
    isFolded ? [columns[0], count, ...columns.slice(1)] : columns, { ...options, search: options.search && (isFolded ? [...options.search, "names"] : options.search) }));
  const box = element("input", { type: "checkbox", checked: true, onchange: () => show(box.checked) });
  if (few.length < all.length) add(element("div", { className: "controls" }, element("label", {}, box, "Equal layers in one row")));
  add(place);
  show(few.length < all.length);
}

const NOT_BF16 = [["not bf16", (row) => row.param !== "bf16" || row.communication !== "bf16"]];
const OF_ONE = "Bytes are those of one rank: communicated per optimizer step, and in memory. Where a row stands for several equal ones, they are those of one.";
foldable("Parameters", OF_ONE, rows, "parameter",
  [{ key: "parameter", label: "parameter, and why it has these dtypes", kind: "name", below: "why" }, { key: "elements", label: "elements", kind: "int" },
    ...DTYPE_COLUMNS, ...bytesOf(rows)],
  { isCompact: true, search: ["parameter", "aliases", "class", "unit", "group", "why"], filters: ["param", "communication", "class"], toggles: NOT_BF16 });

foldable("Groups", OF_ONE, DATA.groups, "group", [{ key: "group", label: "group", kind: "name" }, { key: "kind", label: "kind" },
  { key: "params", label: "parameters", kind: "int" }, { key: "elements", label: "elements", kind: "int" }, ...DTYPE_COLUMNS, ...bytesOf(DATA.groups)],
  { isCompact: true, filters: ["kind"] });
