"use strict";
// The numbers of the page, how they are printed, and what all plots share.
// Names come from files, so they enter the page as text, never as HTML.

const numbers = JSON.parse(document.getElementById("numbers").textContent);
const entries = numbers.entries;

const byId = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);
const ratio = (part, all) => (all > 0 ? part / all : NaN);

// toFixed, but a number halfway between two goes to the even one, as in Python: 0.125 is 0.12.
function toFixed(value, digits) {
  const text = value.toFixed(digits + 30);
  const [kept, rest] = [text.slice(0, -30), text.slice(-30)];
  return /[02468]$/.test(kept) && /^50*$/.test(rest) ? kept : value.toFixed(digits);
}

// As the tables of Python print them: scale and digits are those of the score.
function show(score, value) {
  const { scale, digits, signed } = numbers.scores[score];
  if (!isKnown(value)) return "–";
  if (!signed) return toFixed(value * scale, digits);
  const text = toFixed(Math.abs(value * scale), digits);
  return Number(text) === 0 ? text : (value < 0 ? "−" : "+") + text;
}

function showUnit(score, value) {
  if (!isKnown(value)) return "–";
  return show(score, value) + numbers.scores[score].suffix.replace(" ", "\u00a0");
}

// From the end: the right and the wrong ones above each edge of the fine histogram.
function aboveEdges({ bin, correct, wrong }) {
  const sums = [correct, wrong].map((counts) => {
    const above = new Array(numbers.fineEdges.length).fill(0);
    bin.forEach((b, i) => (above[b] = counts[i]));
    for (let i = above.length - 2; i >= 0; i--) above[i] += above[i + 1];
    return above;
  });
  return { right: sums[0], wrong: sums[1] };
}

const heading = (score) => `${numbers.scores[score].label} (${numbers.scores[score].unit})`;

const showCount = (value) => (isKnown(value) ? value.toLocaleString("en-US") : "–");

// As the tables of operating points print it.
function showThreshold(value) {
  const close = value > 0.9 && value < 1 ? Math.ceil(-Math.log10(1 - value)) + 1 : 0;
  return value.toFixed(Math.max(4, close));
}

// A confidence with enough digits to tell it from 1.
function showConfidence(value) {
  if (value === 0 || value === 1) return String(value);
  const digits = value > 0.9 ? Math.ceil(-Math.log10(1 - value)) + 2 : 3;
  return value.toFixed(Math.min(digits, 9));
}

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A heading whose unit, in brackets at its end, stays on one line.
function unitApart(heading) {
  const at = heading.lastIndexOf(" (");
  return at < 0 ? [heading] : [heading.slice(0, at + 1), make("span", { class: "unit" }, heading.slice(at + 1))];
}

// Rows of strings and elements; the first of a row is its heading.
function fillTable(table, headings, rows) {
  const head = make("tr", {}, ...headings.map((text) => make("th", { scope: "col" }, ...unitApart(text))));
  const body = rows.map(([first, ...rest]) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...rest.map((cell) => make("td", {}, cell)))
  );
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
}

const swatch = (entry) => make("span", { class: "swatch", style: `--color:${entry.color}` });
const named = (entry) => make("span", { class: "named" }, swatch(entry), make("span", {}, entry.name));

function fillSelect(select, options) {
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
  select.closest("label").hidden = options.length < 2;
}

// Plots ------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const plots = [];
const colors = () => numbers.theme[dark.matches ? "dark" : "light"];

// A figure without tools: pointing, tapping and keys are handled by each part of the page.
function newPlot(target, { xLabel, yLabel, xRange, yRange, height = 400, ...more }) {
  const figure = Bokeh.Plotting.figure({
    height,
    sizing_mode: "stretch_width",
    tools: [],
    toolbar_location: null,
    x_axis_label: xLabel,
    y_axis_label: yLabel,
    x_range: xRange,
    y_range: yRange,
    min_border_right: 16,
    min_border_left: 64,
    ...more,
  });
  plots.push(figure);
  paint(figure, colors());
  Bokeh.Plotting.show(figure, target);
  return figure;
}

function paint(figure, { ink, quiet, grid }) {
  figure.background_fill_color = null;
  figure.border_fill_color = null;
  figure.outline_line_color = null;
  for (const axis of [...figure.below, ...figure.left]) {
    axis.axis_label_text_color = ink;
    axis.axis_label_text_font_style = "normal";
    axis.axis_label_text_font = axis.major_label_text_font = "system-ui, sans-serif";
    axis.axis_label_text_font_size = "14px";
    axis.major_label_text_font_size = "13px";
    axis.major_label_text_color = quiet;
    axis.axis_line_color = axis.major_tick_line_color = quiet;
    axis.minor_tick_line_color = null;
  }
  for (const each of gridsOf(figure)) each.grid_line_color = grid;
}

// An empty source of columns, and how points and lines name those for x and y.
const newSource = (...columns) => new Bokeh.ColumnDataSource({ data: Object.fromEntries(columns.map((name) => [name, []])) });
const XY = { x: { field: "x" }, y: { field: "y" } };

dark.addEventListener("change", () => plots.forEach((figure) => paint(figure, colors())));
// Paper is light. Bokeh paints in the next frame, which comes too late for it.
addEventListener("beforeprint", () => {
  for (const figure of plots) {
    paint(figure, numbers.theme.light);
    const view = Bokeh.index.find_one(figure);
    view?.invalidate_painters();
    view?.paint();
  }
});
addEventListener("afterprint", () => plots.forEach((figure) => paint(figure, colors())));

const gridsOf = (figure) => figure.center.filter((each) => "grid_line_color" in each);

// Ticks at given places with given texts, and the grid lines of these axes.
function setTicks(figure, ticks, axes) {
  const ticker = new Bokeh.FixedTicker({ ticks: ticks.map(([place]) => place) });
  for (const axis of axes) {
    axis.ticker = ticker;
    axis.major_label_overrides = new Map(ticks);
  }
  const isSide = (grid) => axes.length > 1 || (axes === figure.below ? 0 : 1) === grid.dimension;
  for (const grid of gridsOf(figure).filter(isSide)) grid.ticker = ticker;
}
