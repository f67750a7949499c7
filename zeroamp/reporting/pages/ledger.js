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
  ["GB all-gathered per step and rank", shown(sum("all_gathered_bytes_per_step"), "gb")],
  ["GB reduced per step and rank", shown(sum("reduced_bytes_per_step"), "gb")],
]);

function sum(key) {
  return rows.some((row) => row[key] === null) ? null : rows.reduce((total, row) => total + row[key], 0);
}

heading("Units");
note("Each box is an FSDP unit, with its parameters inside; its area is its number of elements. Click a unit to enter it.");
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
  const colour = (dtype) => DTYPES[dtype] ?? "#8c959f";
  put("model", "model", "", elements, "#ffffff", `${FORMS.int(elements)} elements`);
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
    branchvalues: "total", sort: false, maxdepth: rows.length > 1500 ? 2 : 3, tiling: { packing: "squarify" }, pathbar: { thickness: 22 },
    marker: { colors: node.colours, line: { width: 1, color: "white" }, pad: { t: 18, l: 2, r: 2, b: 2 } },
    customdata: node.hover, hovertemplate: "%{customdata}<extra></extra>", textinfo: "label" }],
    { margin: { l: 4, r: 4, t: 4, b: 4 }, font: { family: "system-ui, sans-serif", size: 12 } }, CHART);
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
  { key: "bytes_per_all_gather", label: "GB per all-gather", kind: "gb" },
  { key: "all_gathered_bytes_per_step", label: "GB all-gathered per step", kind: "gb" },
  { key: "reduced_bytes_per_step", label: "GB reduced per step", kind: "gb" }]));

const BYTES = [
  { key: "all_gathered_bytes_per_step", label: "gathered GB", kind: "gb", hint: "GB all-gathered per step and rank" },
  { key: "reduced_bytes_per_step", label: "reduced GB", kind: "gb", hint: "GB reduced per step and rank" },
  { key: "stored_bytes_per_rank", label: "shards GiB", kind: "gib", hint: "GiB of shards per rank" },
  { key: "unsharded_bytes_per_rank", label: "unsharded GiB", kind: "gib", hint: "GiB unsharded per rank" },
  { key: "gradient_bytes_per_rank", label: "gradients GiB", kind: "gib", hint: "GiB of gradients per rank" }];
const SHORT = { param: "param", stored: "stored", communication: "communi\u00adcation", accumulate: "accumu\u00adlate", optimizer: "opti\u00admizer", compute: "compute", gradient: "gradi\u00adent" };
const DTYPE_COLUMNS = COLUMNS.map(([key, hint]) => ({ key, label: SHORT[key], kind: "dtype", hint }));

heading("Parameters");
note("Bytes are of one rank: GB per optimizer step, GiB of memory. A cell that is cut shows its text under the pointer.");
add(table(rows, [{ key: "parameter", label: "parameter", kind: "name" },
  { key: "elements", label: "elements", kind: "int" }, ...DTYPE_COLUMNS, { key: "class", label: "class", kind: "brief" },
  { key: "why", label: "why", kind: "brief" }, ...BYTES, { key: "unit", label: "unit", kind: "name" }, { key: "group", label: "group", kind: "name" }],
  { isCompact: true, search: ["parameter", "aliases", "class", "unit", "group", "why"], filters: ["param", "communication", "class"] }));

heading("Groups");
add(table(DATA.groups, [{ key: "group", label: "group", kind: "name" }, { key: "kind", label: "kind" },
  { key: "params", label: "parameters", kind: "int" }, { key: "elements", label: "elements", kind: "int" }, ...DTYPE_COLUMNS, ...BYTES],
  { isCompact: true, filters: ["kind"] }));
