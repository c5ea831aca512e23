// Reliability: accuracy against confidence, for the models, region and class that are chosen.

const LOGIT_END = 9.5; // logits further out are drawn at the edge
const logit = (p) => Math.max(-LOGIT_END, Math.min(LOGIT_END, Math.log(p / (1 - p))));
const LOGIT_TICKS = [0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999].map((p) => [logit(p), String(p)]);
const LINEAR_TICKS = [0, 0.2, 0.4, 0.6, 0.8, 1].map((p) => [p, String(p)]);
const EVERY_CLASS = "top";

const binListeners = []; // called with the chosen bin, or null

{
  const root = byId("reliability");
  const holder = byId("reliability-plot");
  const control = (name) => root.querySelector(`[name="${name}"]`);
  const boxes = [...root.querySelectorAll('[name="model"]')];
  const state = { bins: [], at: -1, chosen: null };

  const shown = () => entries.filter((_, i) => boxes[i].checked);
  const isLogit = () => root.querySelector('[name="scale"]:checked').value === "logit";
  const isTop = () => control("class").value === EVERY_CLASS; // else one class is chosen
  const partOf = (entry) => entry.parts[control("region").value];
  const place = (p) => (isLogit() ? logit(p) : p);

  const figure = newPlot("#reliability-plot", {
    xLabel: "confidence",
    yLabel: "accuracy",
    xRange: new Bokeh.Range1d({ start: 0, end: 1 }),
    yRange: new Bokeh.Range1d({ start: 0, end: 1 }),
    height: 440,
  });
  // Shares of the bins below, on the same axis; lines of single bins end at the floor.
  const FLOOR = 0.001;
  const histogram = newPlot("#histogram-plot", {
    xLabel: "confidence",
    yLabel: `${entries[0].counted} (%)`,
    xRange: new Bokeh.Range1d({ start: 0, end: 1 }),
    yRange: new Bokeh.Range1d({ start: FLOOR, end: 150 }),
    y_axis_type: "log",
    height: 190,
  });
  const cursor = newSource("left", "right", "top", "bottom");
  figure.quad({
    left: { field: "left" },
    right: { field: "right" },
    top: { field: "top" },
    bottom: { field: "bottom" },
    source: cursor,
    fill_color: "#8b98ab",
    fill_alpha: 0.22,
    line_color: null,
  });
  figure.line({ x: [-20, 20], y: [-20, 20], line_dash: "dashed", line_color: "#8b98ab" });
  const layers = entries.map((entry) => {
    const source = newSource("x", "y");
    const band = newSource("x", "low", "high");
    const drawn = [
      figure.varea({
        x: { field: "x" },
        y1: { field: "low" },
        y2: { field: "high" },
        source: band,
        fill_color: entry.color,
        fill_alpha: 0.16,
      }),
      figure.line({ ...XY, source, line_color: entry.color, line_width: 2, line_dash: entry.dash }),
      figure.scatter({ ...XY, source, size: 7, fill_color: entry.color, line_color: null }),
    ];
    const [all, wrong] = [newSource("x", "y"), newSource("x", "y")];
    const step = { ...XY, mode: "after", line_color: entry.color, line_width: 2 };
    drawn.push(histogram.step({ ...step, source: all }), histogram.step({ ...step, source: wrong, line_dash: [2, 3] }));
    return { source, band, all, wrong, drawn };
  });

  // Bins of the diagram: those of the report or, on the logit scale, groups of its fine histogram,
  // at last four to each halving of 1 - confidence.
  function edgesOf(part) {
    if (!isLogit() || !isTop()) return part.edges;
    const edges = numbers.fineEdges;
    return edges.filter((_, i) => i === edges.length - 1 || i % numbers.step === 0);
  }

  function sumsOf(entry) {
    const part = partOf(entry);
    if (!part) return null;
    if (!isTop()) return part.byClass[Number(control("class").value)];
    if (!isLogit()) return part.top;
    const size = edgesOf(part).length - 1;
    const [count, hits, confidence] = [0, 0, 0].map(() => new Array(size).fill(0));
    part.fine.bin.forEach((bin, i) => {
      const group = Math.min(Math.floor(bin / numbers.step), size - 1);
      count[group] += part.fine.correct[i] + part.fine.wrong[i];
      hits[group] += part.fine.correct[i];
      confidence[group] += part.fine.confidence[i];
    });
    return { count, hits, confidence };
  }

  // The interval of accuracy in a bin of the report, which has that of the gap as a part of the ECE.
  function intervalOf(entry, bin) {
    const part = partOf(entry);
    const gap = isTop() ? part.bins[bin] : undefined;
    const count = part.top.count[bin];
    if (!gap || !isKnown(gap.low) || !count) return null;
    const confidence = part.top.confidence[bin] / count;
    const scale = part.pixels / count;
    const inside = (value) => Math.max(0, Math.min(1, value));
    return [inside(confidence - gap.high * scale), inside(confidence - gap.low * scale)];
  }

  function draw() {
    const first = shown().find(partOf) || entries.find(partOf);
    const edges = edgesOf(partOf(first));
    state.bins = edges.slice(1).map((high, i) => ({ low: edges[i], high, index: i }));
    entries.forEach((entry, i) => {
      const { source, band, all, wrong, drawn } = layers[i];
      const sums = boxes[i].checked ? sumsOf(entry) : null;
      drawn.forEach((each) => (each.visible = sums !== null));
      if (!sums) return;
      const held = sums.count.map((_, b) => b).filter((b) => sums.count[b] > 0);
      source.data = {
        x: held.map((b) => place(sums.confidence[b] / sums.count[b])),
        y: held.map((b) => place(sums.hits[b] / sums.count[b])),
      };
      const total = sum(sums.count);
      const own = edgesOf(partOf(entry)).map(place);
      const share = (n) => Math.max((100 * n) / total, FLOOR);
      const shares = (counts) => ({ x: own, y: [...counts.map(share), share(counts[counts.length - 1])] });
      all.data = shares(sums.count);
      wrong.data = shares(sums.count.map((n, b) => n - sums.hits[b]));
      const { top } = partOf(entry);
      const known = control("bands").checked ? top.count.map((_, b) => b).filter((b) => intervalOf(entry, b)) : [];
      band.data = {
        x: known.map((b) => place(top.confidence[b] / top.count[b])),
        low: known.map((b) => place(intervalOf(entry, b)[0])),
        high: known.map((b) => place(intervalOf(entry, b)[1])),
      };
    });
    figure.below[0].axis_label = isTop() ? "confidence" : "probability of the class";
    figure.left[0].axis_label = isTop() ? "accuracy" : "frequency of the class";
    histogram.below[0].axis_label = isTop()
      ? "confidence (dotted: of the wrong)"
      : "probability (dotted: other classes)";
    const low = isLogit() ? logit(edges[1] / 4) : 0;
    const ends = isLogit() ? [Math.max(-7, Math.min(low, -1)), LOGIT_END + 0.3] : [0, 1];
    for (const range of [figure.x_range, figure.y_range, histogram.x_range]) [range.start, range.end] = ends;
    const ticks = isLogit() ? LOGIT_TICKS : LINEAR_TICKS;
    setTicks(figure, ticks, [...figure.below, ...figure.left]);
    setTicks(histogram, ticks, histogram.below);
    setTicks(histogram, [0.01, 1, 100].map((p) => [p, String(p)]), histogram.left);
    holder.setAttribute("aria-valuemax", state.bins.length);
    choose(null);
    pointAt(-1);
    scores();
  }

  // Hovered, or reached by an arrow key.
  function pointAt(index) {
    state.at = index;
    const bin = state.bins[index] || state.chosen;
    const [start, end] = [figure.y_range.start, figure.y_range.end];
    cursor.data = bin
      ? { left: [place(bin.low)], right: [place(bin.high)], bottom: [start], top: [end] }
      : { left: [], right: [], bottom: [], top: [] };
    read(bin);
  }

  function choose(bin) {
    state.chosen = bin;
    binListeners.forEach((listen) => listen(isTop() ? bin : null));
    byId("unchoose").hidden = !bin;
  }

  const rangeText = (bin) => `${showConfidence(bin.low)} to ${showConfidence(bin.high)}`;

  function read(bin) {
    byId("bin-title").textContent = bin ? `Bin ${rangeText(bin)}` : "No bin is chosen";
    holder.setAttribute("aria-valuenow", bin ? bin.index + 1 : 0);
    holder.setAttribute("aria-valuetext", bin ? rangeText(bin) : "no bin");
    byId("bin-hint").hidden = Boolean(bin);
    byId("bin-table").hidden = byId("bin-images").hidden = !bin;
    if (!bin) return;
    const rows = [];
    const most = [];
    for (const entry of shown()) {
      const sums = sumsOf(entry);
      if (!sums) continue;
      if (sums.count.length !== state.bins.length) { // a report with other bins
        rows.push([named(entry), "–", "–", "–", "–"]);
        continue;
      }
      const count = sums.count[bin.index];
      const confidence = ratio(sums.confidence[bin.index], count);
      const accuracy = ratio(sums.hits[bin.index], count);
      const ends = isLogit() ? null : intervalOf(entry, bin.index);
      const interval = ends ? ` [${show("accuracy", ends[0])}, ${show("accuracy", ends[1])}]` : "";
      rows.push([
        named(entry),
        show("mean_confidence", confidence),
        make("span", {}, show("accuracy", accuracy), make("span", { class: "interval" }, interval)),
        show("bias", confidence - accuracy),
        showCount(count),
      ]);
      const gap = !isTop() || isLogit() ? null : partOf(entry).bins[bin.index];
      for (const [name, part] of gap ? gap.images : []) most.push([named(entry), name, show("bias", part)]);
    }
    const unit = numbers.scores.accuracy.unit;
    const [mean, share] = isTop() ? ["confidence", "accuracy"] : ["probability", "frequency"];
    fillTable(
      byId("bin-table"),
      ["model", `${mean} (${unit})`, `${share} (${unit})`, `gap (${numbers.scores.bias.unit})`, entries[0].counted],
      rows
    );
    byId("bin-images").hidden = !most.length;
    fillTable(byId("bin-images"), ["model", "image that contributes most", `to the ECE (${numbers.scores.bias.unit})`], most);
  }

  // Scores of the chosen region, or under the chosen protocol.
  function scores() {
    const protocol = control("protocol").value;
    const names = ["accuracy", "miou", "ece", "sce"];
    const rows = shown()
      .filter(partOf)
      .map((entry) => {
        const found = protocol ? entry.protocols[protocol] || {} : partOf(entry).scores;
        return [named(entry), ...names.map((name) => show(name, found[name]))];
      });
    fillTable(byId("part-scores"), ["model", ...names.map(heading)], rows);
  }

  function binAt(x) {
    const last = state.bins.length - 1;
    const found = state.bins.findIndex((bin) => x <= place(bin.high));
    return found < 0 ? last : found;
  }

  figure.on_event("mousemove", (event) => pointAt(binAt(event.x)));
  figure.on_event("mouseleave", () => pointAt(-1));
  figure.on_event("tap", (event) => {
    choose(state.bins[binAt(event.x)]);
    pointAt(binAt(event.x));
  });
  holder.addEventListener("keydown", (event) => {
    const last = state.bins.length - 1;
    const at = state.at < 0 && state.chosen ? state.chosen.index : state.at;
    const next = { ArrowRight: Math.min(at + 1, last), ArrowLeft: at < 0 ? last : Math.max(at - 1, 0) };
    Object.assign(next, { ArrowUp: next.ArrowRight, ArrowDown: next.ArrowLeft, Home: 0, End: last });
    if (event.key in next) pointAt(next[event.key]);
    else if (event.key === "Enter" || event.key === " ") {
      choose(state.bins[at] || null);
      pointAt(at);
    } else if (event.key === "Escape") {
      choose(null);
      pointAt(-1);
    } else return;
    event.preventDefault();
  });
  byId("unchoose").addEventListener("click", () => {
    choose(null);
    pointAt(-1);
  });
  root.querySelector(".controls").addEventListener("change", draw);
  const names = (of) => [...new Set(entries.flatMap((entry) => Object.keys(entry[of])))];
  fillSelect(control("region"), names("parts").map((name) => [name, name === "all" ? "whole images" : name]));
  fillSelect(control("class"), [
    [EVERY_CLASS, "the predicted class"],
    ...entries[0].classes.map((name, c) => [String(c), name]),
  ]);
  fillSelect(control("protocol"), [["", "all pixels together"], ...names("protocols").map((name) => [name, name])]);
  draw();
}
