// Objects: how many of those with a confidence are real, and what is left above a threshold.

if (byId("object-table")) {
  const slider = byId("object-threshold");
  const edges = numbers.fineEdges;
  const percent = numbers.scores.accuracy.scale;
  const models = entries.flatMap((entry) =>
    entry.objects.map((of) => {
      const plainly = of.calibration === "none";
      const name = entry.name + (plainly ? "" : `, objects ${of.calibration}`);
      return { ...of, ...aboveEdges(of.fine), name, color: entry.color, line_dash: plainly ? [] : [6, 4] };
    })
  );
  const chosen = models.flatMap((model) => model.points.map((point) => ({ ...point, model })));
  const known = chosen.filter((point) => edges.includes(point.threshold));
  const kept = numbers.thresholds.concat(known.map((point) => point.threshold));
  const stops = [...new Set(kept)].sort((a, b) => a - b);
  slider.max = stops.length - 1;

  const whole = () => new Bokeh.Range1d({ start: 0, end: percent });
  const square = (xLabel, yLabel) => ({ xLabel, yLabel, xRange: whole(), yRange: whole(), height: 340 });
  const diagram = newPlot("#object-reliability", square("confidence of the object (%)", "real objects (%)"));
  diagram.line({ x: [0, percent], y: [0, percent], line_dash: "dashed", line_color: "#8b98ab" });
  const curve = newPlot("#object-curve", square("recall (%)", "precision (%)"));
  const markers = models.map(({ top, right, wrong, truth, color, line_dash }) => {
    const held = top.count.map((_, b) => b).filter((b) => top.count[b] > 0);
    const bins = {
      x: held.map((b) => (percent * top.confidence[b]) / top.count[b]),
      y: held.map((b) => (percent * top.hits[b]) / top.count[b]),
    };
    diagram.line({ ...bins, line_color: color, line_width: 2, line_dash });
    const size = held.map((b) => 4 + 14 * Math.sqrt(top.count[b] / sum(top.count)));
    diagram.scatter({ ...bins, size, fill_color: color, line_color: null });
    const at = edges.map((_, i) => i).filter((i) => right[i] + wrong[i] > 0);
    curve.line({
      x: at.map((i) => percent * ratio(right[i], truth)),
      y: at.map((i) => percent * ratio(right[i], right[i] + wrong[i])),
      line_color: color,
      line_width: 2,
      line_dash,
    });
    const source = newSource("x", "y");
    curve.scatter({ ...XY, source, size: 11, fill_color: color, line_color: null });
    return source;
  });

  function draw() {
    const threshold = stops[Number(slider.value)];
    const at = edges.indexOf(threshold);
    byId("object-value").textContent = showThreshold(threshold);
    slider.setAttribute("aria-valuetext", showThreshold(threshold));
    const rows = models.map((model, m) => {
      const right = model.right[at];
      const wrong = model.wrong[at];
      const recall = ratio(right, model.truth);
      const precision = ratio(right, right + wrong);
      const isShown = right + wrong > 0;
      markers[m].data = { x: isShown ? [percent * recall] : [], y: isShown ? [percent * precision] : [] };
      const perImage = toFixed(ratio(wrong, model.images), 2);
      return [named(model), showCount(right + wrong), show("accuracy", precision), show("accuracy", recall), perImage];
    });
    const headings = ["model", "objects", "precision (%)", "recall (%)", "false per image"];
    fillTable(byId("object-table"), headings, rows);
  }

  byId("object-points").append(
    ...known.map((point) => {
      const go = () => {
        slider.value = stops.indexOf(point.threshold);
        draw();
      };
      const after = point.model.calibration === "none" ? "" : `, ${point.model.calibration}`;
      const text = `${point.target.replace("object-", "")}${after}: ${showThreshold(point.threshold)}`;
      return make("button", { type: "button", onclick: go, title: point.verdict }, swatch(point.model), text);
    })
  );
  byId("object-points").hidden = !known.length;
  slider.addEventListener("input", draw);
  slider.value = known.length ? stops.indexOf(known[0].threshold) : stops.findIndex((stop) => stop >= 0.5);
  draw();
}
