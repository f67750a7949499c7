"use strict";
// What all pages share: elements, numbers, charts, and tables that are searched, filtered and sorted.
// Everything from the data becomes text by textContent, never markup.

const COLOURS = ["#2386c9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c959f", "#8f8f00", "#9a6ee8"];
const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const DTYPES = { bf16: "#0969da", fp16: "#8250df", fp32: "#bc4c00", fp64: "#82071e", "per op": "#57606a" }, OTHER = "#57606a";
const IS_NARROW = window.innerWidth < 600;
const CHART = { displaylogo: false, responsive: true, displayModeBar: !IS_NARROW, modeBarButtonsToRemove: ["lasso2d", "select2d"] };

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Plotly reads some markup in labels: names, classes and reasons are shown as they are.
const text = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

const page = () => document.getElementById("page");
const add = (...children) => page().append(...children);
const heading = (text) => add(element("h2", { textContent: text }));
const note = (text) => add(element("p", { textContent: text }));

function tiles(pairs) {
  const made = pairs.map(([label, value]) =>
    element("div", { className: "tile" }, element("b", { textContent: value }), element("span", { textContent: label })));
  add(element("div", { className: "tiles" }, ...made));
}

// The same numbers as the terminal's: three significant digits, at least two decimals, thousands separated.
function decimals(value, digits = 3) {
  if (value === 0) return "0";
  const places = Math.min(12, Math.max(2, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}
const FORMS = {
  int: (value) => value.toLocaleString("en-US"),
  float: (value) => (Number.isFinite(value) ? decimals(value) : String(value)),
  percent: (value) => `${(100 * value).toFixed(1)}%`,
};
// Bytes in one unit for a whole column or chart: that of the largest number.
function unitOf(numbers) {
  const largest = Math.max(...numbers, 0);
  const power = [3, 2, 1].find((power) => largest >= 1024 ** power) ?? 0;
  return { name: ["B", "KiB", "MiB", "GiB"][power], size: 1024 ** power };
}
function size(number) {
  const unit = unitOf([number ?? 0]);
  return number === null ? "–" : `${decimals(number / unit.size)} ${unit.name}`;
}
// The column of bytes `key`, in the unit of its largest number in any of the rows.
function bytes(rows, key, label, more = {}) {
  const unit = unitOf(rows.map((row) => row[key] ?? 0)), scaled = `${key} scaled`;
  for (const row of rows) row[scaled] = row[key] === null ? null : row[key] / unit.size;
  return { key: scaled, label: `${label}, ${unit.name}`, kind: "float", ...more };
}
const shown = (value, kind) =>
  value === null || value === undefined ? "–" : kind in FORMS && typeof value === "number" ? FORMS[kind](value) : String(value);

function dtypeChip(name) {
  const chip = element("span", { className: "chip", textContent: name ?? "–" });
  chip.style.background = DTYPES[name] ?? OTHER;
  return chip;
}

// columns: {key, label, below: key of a smaller text, kind: text | name | fits (yes and no are coloured) | dtype | int | float | percent | number, hint}
// options: {search: [keys], filters: [keys], toggles: [[label, row -> bool]], isBest: row -> bool, limit, isCompact: narrow columns}
function table(rows, columns, options = {}) {
  const state = { sort: null, down: false, limit: options.limit ?? 300, choices: {}, toggles: [] };
  const body = element("tbody");
  const count = element("span", { className: "count" });
  const more = element("button", { textContent: "Show all", hidden: true, onclick: () => { state.limit = Infinity; draw(); } });
  const words = element("input", { type: "search", placeholder: "Search, words in any order", ariaLabel: "Search" });
  words.addEventListener("input", draw);
  const isNumber = (column) => ["int", "float", "percent", "number"].includes(column.kind);
  const heads = columns.map((column) => element("th", { className: isNumber(column) ? "number" : "", title: column.hint ?? "" },
    element("button", { textContent: column.label, type: "button", onclick: () => sortBy(column) })));

  function sortBy(column) {
    state.down = state.sort === column ? !state.down : isNumber(column);
    state.sort = column;
    heads.forEach((head, index) => {
      const isSorted = columns[index] === column;
      head.ariaSort = isSorted ? (state.down ? "descending" : "ascending") : "none";
      head.firstChild.textContent = columns[index].label + (isSorted ? (state.down ? " ▾" : " ▴") : "");
    });
    draw();
  }
  function chosen() {
    const sought = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) =>
      Object.entries(state.choices).every(([key, value]) => value === "" || String(row[key]) === value) &&
      state.toggles.every((keeps) => keeps(row)) &&
      sought.every((word) => (options.search ?? []).some((key) => String(row[key]).toLowerCase().includes(word))));
    if (state.sort === null) return found;
    const { key } = state.sort, sign = state.down ? -1 : 1;
    return [...found].sort((a, b) => {
      const [x, y] = [a[key] ?? null, b[key] ?? null];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
    });
  }
  function cell(row, column) {
    const value = row[column.key];
    const made = element("td", { className: isNumber(column) ? "number" : column.kind === "fits" ? value : column.kind ?? "" });
    if (column.kind === "dtype" && value !== null && value !== undefined) made.append(dtypeChip(value));
    else if (column.kind === "name") made.append(...shown(value).split(/(?<=\.)/).flatMap((part) => [part, element("wbr")]));  // wraps after dots
    else made.append(shown(value, column.kind));
    if (column.below && row[column.below]) made.append(element("small", { textContent: row[column.below] }));
    return made;
  }
  function draw() {
    const found = chosen(), visible = found.slice(0, state.limit);
    body.replaceChildren(...visible.map((row) =>
      element("tr", { className: options.isBest?.(row) ? "best" : "" }, ...columns.map((column) => cell(row, column)))));
    count.textContent = `${found.length.toLocaleString("en-US")} of ${rows.length.toLocaleString("en-US")}` +
      (visible.length < found.length ? `, the first ${visible.length} shown` : "");
    more.hidden = visible.length === found.length;
    requestAnimationFrame(mark);
  }
  // Says that there are more columns on the right, which a scroll bar may not show before it is used.
  const mark = () => { hint.hidden = scroll.scrollLeft + scroll.clientWidth > scroll.scrollWidth - 4; };
  const hint = element("div", { className: "more", textContent: "more columns \u2192", hidden: true });
  const scroll = element("div", { className: "scroll", tabIndex: 0, onscroll: mark },
    element("table", { className: options.isCompact ? "compact" : "" }, element("thead", {}, element("tr", {}, ...heads)), body));
  addEventListener("resize", mark);
  const selects = (options.filters ?? []).map((key) => {
    const values = [...new Set(rows.map((row) => String(row[key])))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const label = columns.find((column) => column.key === key)?.label ?? key;
    const all = element("option", { value: "", textContent: `${label}: all` });
    return element("select", { ariaLabel: `Filter by ${label}`, name: key, onchange: (event) => { state.choices[key] = event.target.value; draw(); } },
      all, ...values.map((value) => element("option", { value, textContent: value === "null" ? "–" : value })));
  });
  const toggles = (options.toggles ?? []).map(([label, keeps]) => {
    const box = element("input", { type: "checkbox", onchange: () => { state.toggles = box.checked ? [...state.toggles, keeps] : state.toggles.filter((each) => each !== keeps); draw(); } });
    return element("label", {}, box, label);
  });
  const has_controls = options.search || options.filters || options.toggles;
  const made = element("section", {},
    has_controls ? element("div", { className: "controls" }, options.search ? words : null, ...selects, ...toggles, count, more) : null,
    hint, scroll);
  draw();
  return made;
}

const charts = () => { const made = element("div", { className: "charts" }); add(made); return made; };

function chart(parent, traces, layout, height = 340, shape = "") {
  const made = element("div", { className: `chart ${shape}` });
  made.style.height = `${height}px`;
  parent.append(made);
  const usual = { margin: { l: 62, r: 16, t: 42, b: 60 }, hovermode: "x unified", xaxis: { automargin: true }, yaxis: { automargin: true } };
  Plotly.newPlot(made, traces, { ...usual, ...layout, ...colours() }, CHART);
  return made;
}
// A chart that is alone in the last row gets all of it.
function fillLastRow(parent) {
  const last = parent.lastElementChild;
  if (parent.children.length % 2 === 0 || last === null) return;
  last.classList.add("wide");
  Plotly.Plots.resize(last);
}
// The colours of charts, from page.css. A system that changes between light and dark draws the charts again.
const colours = () => ({ font: { family: "system-ui, sans-serif", size: 12, color: theme("ink") }, paper_bgcolor: theme("paper"), plot_bgcolor: theme("paper"),
  hoverlabel: { bgcolor: theme("back"), font: { color: theme("ink") } } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const made of document.querySelectorAll(".js-plotly-plot")) {
    const axes = Object.fromEntries(["xaxis", "yaxis"].flatMap((each) => [[`${each}.gridcolor`, theme("grid")], [`${each}.zerolinecolor`, theme("line")]]));
    Plotly.relayout(made, { ...colours(), ...axes });
  }
});
const LEGEND = { orientation: "h", y: IS_NARROW ? -0.12 : -0.3, yanchor: "top", font: { size: IS_NARROW ? 10 : 11 } };
const below = (title, more = {}) => axis(IS_NARROW ? "" : title, more);
const axis = (title, more = {}) => ({ title: { text: title }, gridcolor: theme("grid"), zerolinecolor: theme("line"), automargin: true, exponentformat: "none", separatethousands: true, ...more });
const titled = (text) => ({ text, font: { size: 14 }, x: 0.02, xanchor: "left" });

const DATA = JSON.parse(document.getElementById("data").textContent);
