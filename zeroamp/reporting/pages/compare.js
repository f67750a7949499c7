"use strict";
// Two training commands beside each other: `zeroamp compare --json`, with the rows and sentences of the terminal.

const number = (value) => (typeof value === "string" ? Number(value.replace("inf", "Infinity")) : value ?? null);
const first = (name, key) => DATA.runs[name][0][key].map(number);

const conclusions = element("ul", {}, ...DATA.conclusions.map((sentence) => element("li", { textContent: sentence })));
add(conclusions);
heading("Over the steps");
note("Of the first timed run of each command.");
const panels = charts();
for (const [title, key] of [["loss", "losses"], ["gradient norm", "grad_norms"]]) {
  const values = { A: first("A", key), B: first("B", key) };
  if (values.A.length === 0 || values.B.length === 0) continue;
  const steps = values.A.map((_, index) => index + 1), style = { A: { width: 4, color: COLOURS[5] }, B: { width: 1.6, color: COLOURS[1] } };
  const line = (name) => ({ type: "scatter", mode: "lines+markers", name, x: steps, y: values[name], line: style[name] });
  chart(panels, [line("A"), line("B")], { title: titled(title), xaxis: below("step", { dtick: Math.ceil(steps.length / 10) }), yaxis: axis(title), showlegend: true, legend: LEGEND });
  const apart = values.A.map((value, index) => (values.B[index] ?? NaN) - value);
  chart(panels, [{ type: "bar", name: "B - A", x: steps, y: apart, marker: { color: COLOURS[0] } }],
    { title: titled(`${title}: B - A`), xaxis: below("step", { dtick: Math.ceil(steps.length / 10) }), yaxis: axis("B - A", apart.every((value) => value === 0) ? { range: [-1, 1] } : {}) });
}
heading("All numbers");
add(table(DATA.rows, Object.keys(DATA.rows[0]).map((key) => ({ key, label: key, kind: key === "" ? "text" : "number" }))));
