// Plots of gaps by class, of shifts and of training.

const legend = () => (entries.length > 1 ? entries.map((entry) => named(entry)) : []);
document.querySelectorAll("[data-legend]").forEach((each) => each.append(...legend()));

// A figure whose lines are drawn again whenever a choice changes.
function linePlot(target, xLabel, height) {
  const range = () => new Bokeh.DataRange1d({ range_padding: 0.05 });
  const figure = newPlot(target, { xLabel, yLabel: "", xRange: range(), yRange: range(), height });
  const layers = entries.map(({ color, dash }) => {
    const source = newSource("x", "y");
    const ring = newSource("x", "y");
    figure.line({ ...XY, source, line_color: color, line_width: 2, line_dash: dash });
    figure.scatter({ ...XY, source, size: 6, fill_color: color, line_color: null });
    figure.scatter({ ...XY, source: ring, size: 14, fill_color: null, line_color: color, line_width: 2 });
    return { source, ring };
  });
  const columns = (points) => ({ x: points.map(([x]) => x), y: points.map(([, y]) => y) });
  return (score, pointsOf) => {
    const { scale } = numbers.scores[score];
    const scaled = (points) => columns(points.filter(([, y]) => isKnown(y)).map(([x, y]) => [x, y * scale]));
    figure.left[0].axis_label = heading(score);
    entries.forEach((entry, e) => {
      const { points, marked } = pointsOf(entry);
      layers[e].source.data = scaled(points);
      layers[e].ring.data = scaled(marked);
    });
  };
}

const scoreOptions = (names) => names.map((name) => [name, heading(name)]);

if (byId("heat-plot")) {
  const classes = entries[0].classes;
  const select = byId("heat-model");
  const figure = newPlot("#heat-plot", {
    xLabel: "probability of the class",
    yLabel: "",
    xRange: new Bokeh.Range1d({ start: 0, end: 1 }),
    yRange: new Bokeh.Range1d({ start: classes.length, end: 0 }),
    height: Math.max(180, 90 + 18 * classes.length),
    min_border_left: 20,
  });
  const source = newSource("left", "right", "top", "bottom", "color", "alpha");
  const field = (name) => ({ field: name });
  figure.quad({
    ...Object.fromEntries(["left", "right", "top", "bottom"].map((side) => [side, field(side)])),
    source,
    fill_color: field("color"),
    fill_alpha: field("alpha"),
    line_color: "#8b98ab",
    line_alpha: 0.25,
  });
  figure.left[0].ticker = new Bokeh.FixedTicker({ ticks: classes.map((_, c) => c + 0.5) });
  const short = (name) => (name.length > 18 ? `${name.slice(0, 17)}…` : name);
  figure.left[0].major_label_overrides = new Map(classes.map((name, c) => [c + 0.5, short(name)]));
  let cells = [];
  const draw = () => {
    const part = Object.values(entries[Number(select.value)].parts)[0];
    cells = part.byClass.flatMap(({ count, hits, confidence }, c) =>
      count.map((n, b) => ({ c, b, n, low: part.edges[b], high: part.edges[b + 1], gap: (confidence[b] - hits[b]) / n }))
    );
    const held = cells.filter((cell) => cell.n > 0);
    source.data = {
      left: held.map((cell) => cell.low),
      right: held.map((cell) => cell.high),
      top: held.map((cell) => cell.c),
      bottom: held.map((cell) => cell.c + 1),
      color: held.map((cell) => (cell.gap > 0 ? numbers.theme.over : numbers.theme.under)),
      alpha: held.map((cell) => Math.min(Math.abs(cell.gap) / 0.3, 1)),
    };
  };
  const at = ({ x, y }) => cells.find((cell) => cell.c === Math.floor(y) && cell.low < x && x <= cell.high);
  figure.on_event("mousemove", (event) => {
    const cell = at(event);
    const where = cell && `${classes[cell.c]}, probability ${showConfidence(cell.low)} to ${showConfidence(cell.high)}`;
    byId("heat-at").textContent = !cell ? "" : `${where}: ${cell.n ? `${showUnit("bias", cell.gap)}, ${showCount(cell.n)} ${entries[0].counted}` : "empty"}`;
  });
  figure.on_event("tap", (event) => {
    const choice = document.querySelector('#reliability [name="class"]');
    choice.value = String(Math.max(0, Math.min(classes.length - 1, Math.floor(event.y))));
    choice.dispatchEvent(new Event("change", { bubbles: true }));
    byId("reliability").scrollIntoView();
  });
  fillSelect(select, entries.map((entry, e) => [String(e), entry.name]));
  select.addEventListener("change", draw);
  draw();
}

if (byId("severity-plot")) {
  const [score, kind] = [byId("severity-score"), byId("severity-kind")];
  const graded = entries.flatMap((entry) => entry.shifts).filter((shift) => shift.severity !== null);
  const kinds = [...new Set(graded.map((shift) => shift.kind))];
  const plot = linePlot("#severity-plot", "severity (0: clean)", 320);
  const mean = (values) => sum(values) / values.length;
  const steps = [0, 1, 2, 3, 4, 5].map((grade) => [grade, String(grade)]);
  setTicks(plots[plots.length - 1], steps, plots[plots.length - 1].below);
  const draw = () =>
    plot(score.value, ({ shifts, clean }) => {
      const shown = shifts.filter((each) => each.severity !== null && (!kind.value || each.kind === kind.value));
      const grades = [...new Set(shown.map((each) => each.severity))].sort();
      const points = grades.map((g) => [g, mean(shown.filter((s) => s.severity === g).map((s) => s[score.value]))]);
      return { points: shown.length ? [[0, clean[score.value]], ...points] : [], marked: [] };
    });
  fillSelect(score, scoreOptions(["ece", "sce", "accuracy", "mean_confidence"]));
  fillSelect(kind, [["", "mean over all"], ...kinds.map((name) => [name, name])]);
  for (const each of [score, kind]) each.addEventListener("change", draw);
  score.closest(".ask").firstElementChild.hidden = !graded.length;
  draw();
  const lowest = Math.min(...entries.flatMap(({ clean, shifts }) => [clean, ...shifts].flatMap((s) => [s.accuracy, s.mean_confidence])));
  const range = () => new Bokeh.Range1d({ start: Math.max(0, 10 * Math.floor(10 * lowest)), end: 101 });
  const figure = newPlot("#belief-plot", { xLabel: heading("accuracy"), yLabel: heading("mean_confidence"), xRange: range(), yRange: range(), height: 320 });
  figure.line({ x: [0, 100], y: [0, 100], line_dash: "dashed", line_color: "#8b98ab" });
  for (const { clean, shifts, color } of entries.filter((entry) => entry.shifts.length)) {
    const of = (list) => ({ x: list.map((s) => 100 * s.accuracy), y: list.map((s) => 100 * s.mean_confidence) });
    figure.scatter({ ...of([clean, ...shifts]), size: 7, fill_color: color, line_color: null });
    figure.scatter({ ...of([clean]), size: 15, fill_color: null, line_color: color, line_width: 2 });
  }
}

if (byId("risk-plot")) {
  const select = byId("risk-model");
  const figure = newPlot("#risk-plot", {
    xLabel: "accepted (%)",
    yLabel: "wrong among the accepted (%)",
    xRange: new Bokeh.Range1d({ start: 0, end: 100 }),
    yRange: new Bokeh.DataRange1d({ start: 0 }),
    height: 320,
  });
  const known = entries.filter((entry) => entry.detection.length);
  const longest = known.map((entry) => entry.detection).sort((a, b) => b.length - a.length)[0];
  const sources = longest.map(({ color, dash }) => {
    const source = newSource("x", "y");
    figure.line({ ...XY, source, line_color: color, line_width: 2, line_dash: dash });
    return source;
  });
  const draw = () => {
    const kinds = known[Number(select.value)].detection;
    const percents = (values) => (values ?? []).map((value) => 100 * value);
    sources.forEach((source, k) => (source.data = { x: percents(kinds[k]?.coverage), y: percents(kinds[k]?.risk) }));
    byId("risk-key").replaceChildren(...kinds.map(({ label, color }) => named({ name: label, color })));
  };
  fillSelect(select, known.map((entry, e) => [String(e), entry.name]));
  select.addEventListener("change", draw);
  draw();
}

if (byId("training-plot")) {
  const select = byId("training-score");
  const plot = linePlot("#training-plot", "epoch", 320);
  const known = ["ece", "sce", "accuracy", "miou"].filter((name) => entries.some(({ history }) => history.some((line) => isKnown(line[name]))));
  const draw = () =>
    plot(select.value, ({ history }) => {
      const points = history.map((line) => [line.epoch, line[select.value]]);
      return { points, marked: points.filter((_, i) => history[i].best).slice(-1) };
    });
  fillSelect(select, scoreOptions(known));
  select.addEventListener("change", draw);
  draw();
}
