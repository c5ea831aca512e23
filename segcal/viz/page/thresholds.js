// Thresholds: what is accepted, and how much of it is right, where confidence is above a threshold.

{
  const slider = byId("threshold");
  const edges = numbers.fineEdges;
  const stops = numbers.thresholds; // of the slider; each is one of the edges
  const percent = numbers.scores.accuracy.scale;
  slider.max = stops.length - 1;

  const above = entries.map((entry) => {
    const { fine, pixels } = Object.values(entry.parts)[0];
    const { right, wrong } = aboveEdges(fine);
    return { count: right.map((count, i) => count + wrong[i]), wrong, pixels };
  });

  const figure = newPlot("#threshold-plot", {
    xLabel: "accepted (%)",
    yLabel: "wrong among the accepted (%)",
    xRange: new Bokeh.Range1d({ start: 0, end: percent }),
    yRange: new Bokeh.DataRange1d({ start: 0 }),
    height: 320,
  });
  const markers = entries.map((entry, e) => {
    const { count, wrong, pixels } = above[e];
    const held = edges.map((_, i) => i).filter((i) => count[i] > 0 && count[i] !== count[i + 1]);
    figure.line({
      x: held.map((i) => (percent * count[i]) / pixels),
      y: held.map((i) => (percent * wrong[i]) / count[i]),
      line_color: entry.color,
      line_width: 2,
    });
    const points = entry.points.filter((point) => isKnown(point.accuracy));
    figure.scatter({
      x: points.map((point) => percent * point.coverage),
      y: points.map((point) => percent * (1 - point.accuracy)),
      marker: "diamond",
      size: 14,
      fill_color: null,
      line_color: entry.color,
      line_width: 2,
    });
    const source = newSource("x", "y");
    figure.scatter({ ...XY, source, size: 11, fill_color: entry.color, line_color: null });
    return source;
  });

  const rowOf = (name, accepted, wrong, all) => [
    name,
    show("accuracy", ratio(accepted, all)),
    show("accuracy", ratio(accepted - wrong, accepted)),
    show("error", ratio(wrong, accepted)),
    showCount(accepted),
  ];

  function fillAccepted(table, first, counted, rows) {
    const unit = numbers.scores.accuracy.unit;
    fillTable(table, [first, `accepted (${unit})`, `right among these (${unit})`, `wrong (${unit})`, counted], rows);
  }

  function draw() {
    const threshold = stops[Number(slider.value)];
    const at = edges.indexOf(threshold);
    const text = showThreshold(threshold);
    byId("threshold-value").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    const rows = entries.map((entry, e) => {
      const { count, wrong, pixels } = above[e];
      const known = count[at] > 0;
      markers[e].data = {
        x: known ? [(percent * count[at]) / pixels] : [],
        y: known ? [percent * ratio(wrong[at], count[at])] : [],
      };
      return rowOf(named(entry), count[at], wrong[at], pixels);
    });
    fillAccepted(byId("threshold-table"), "model", entries[0].counted, rows);
    drawClasses(threshold);
  }

  // What is accepted as each class, at the first threshold from this one on that is known by class.
  function drawClasses(threshold) {
    const entry = entries[Number(byId("threshold-model").value)];
    const known = edges.filter((_, i) => i % numbers.step === 0);
    const from = known.findIndex((edge) => edge >= threshold);
    const isKnownHere = from >= 0;
    byId("threshold-classes").hidden = !isKnownHere;
    byId("threshold-classes-note").textContent = !isKnownHere
      ? `Known by class up to ${showThreshold(known[known.length - 1])}.`
      : known[from] === threshold
        ? `Accepted where confidence is above ${showThreshold(threshold)}.`
        : `Read at ${showThreshold(known[from])}, the next threshold that is known by class.`;
    if (!isKnownHere) return;
    const rows = entry.accepted.map(({ bin, correct, wrong }, c) => {
      const above = (counts) => sum(counts.filter((_, i) => bin[i] >= from));
      return rowOf(entry.classes[c], above(correct) + above(wrong), above(wrong), sum(correct) + sum(wrong));
    });
    fillAccepted(byId("threshold-classes"), "predicted class", entry.counted, rows);
  }

  const buttons = entries.flatMap((entry) =>
    entry.points
      .filter((point) => stops.includes(point.threshold))
      .map((point) => {
        const go = () => {
          slider.value = stops.indexOf(point.threshold);
          draw();
        };
        const text = `${point.target}: ${showThreshold(point.threshold)}`;
        return make("button", { type: "button", onclick: go, title: point.verdict }, swatch(entry), text);
      })
  );
  byId("operating-points").append(...buttons);
  byId("operating-points").hidden = !buttons.length;
  fillSelect(byId("threshold-model"), entries.map((entry, e) => [String(e), entry.name]));
  slider.addEventListener("input", draw);
  byId("threshold-model").addEventListener("change", draw);
  slider.value = stops.findIndex((stop) => stop >= 0.9);
  draw();
}
