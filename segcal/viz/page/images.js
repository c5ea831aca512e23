// Images: all of them in a table to sort and filter, and confidence against accuracy of each.

function overlayOf(name, model) {
  const found = [...document.querySelectorAll("[data-overlay]")].filter(
    (each) => each.dataset.overlay === name
  );
  return found.find((each) => Number(each.dataset.model) === model) || found[0];
}

const hasOverlay = (name) => overlayOf(name) !== undefined;

function openOverlay(name, model) {
  const figure = overlayOf(name, model);
  for (let at = figure; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  figure.scrollIntoView({ block: "start" });
  figure.focus({ preventScroll: true });
}

if (byId("find")) {
  const root = byId("find");
  const PAGE = 50;
  const control = (name) => root.querySelector(`[name="${name}"]`);
  const state = { rows: [], found: [], sort: "ece", down: true, page: 0, at: null };
  const scored = (key, score) => ({ key, label: heading(score), text: (row) => show(score, row[key]) });
  const signed = (row) => make("span", { class: row.bias > 0 ? "over" : "under" }, show("bias", row.bias));
  const columns = [
    { key: "name", label: "image" },
    scored("ece", "ece"),
    scored("accuracy", "accuracy"),
    scored("confidence", "mean_confidence"),
    { key: "bias", label: heading("bias"), text: signed },
    { key: "pixels", label: entries[0].counted, text: (row) => showCount(row.pixels) },
  ];

  const figure = newPlot("#image-plot", {
    xLabel: "accuracy of the image (%)",
    yLabel: "mean confidence (%)",
    xRange: new Bokeh.Range1d({ start: 0, end: 100 }),
    yRange: new Bokeh.Range1d({ start: 0, end: 100 }),
    height: 400,
  });
  figure.line({ x: [0, 100], y: [0, 100], line_dash: "dashed", line_color: "#8b98ab" });
  const source = newSource("x", "y", "color");
  figure.scatter({ ...XY, source, size: 6, fill_color: { field: "color" }, fill_alpha: 0.7, line_color: null });
  const marked = newSource("x", "y");
  figure.scatter({ ...XY, source: marked, size: 14, fill_color: null, line_color: "#8b98ab", line_width: 3 });

  function load() {
    const { names, pixels, correct, ece, bias } = entries[Number(control("model").value)].images;
    state.rows = names.map((name, i) => {
      const accuracy = correct ? correct[i] / pixels[i] : NaN;
      const own = bias ? bias[i] : NaN;
      return { name, ece: ece[i], accuracy, confidence: accuracy + own, bias: own, pixels: pixels[i] };
    });
    select();
  }

  // What the filters leave, in order.
  function select() {
    const word = control("word").value.trim().toLowerCase();
    const least = control("least").value === "" ? -Infinity : Number(control("least").value);
    const sign = control("sign").value;
    state.found = state.rows.filter(
      (row) =>
        row.name.toLowerCase().includes(word) &&
        row.ece * numbers.scores.ece.scale >= least &&
        (!sign || (sign === "over" ? row.bias > 0 : row.bias < 0))
    );
    const { sort, down } = state;
    const order = (a, b) => {
      if (sort === "name") return a.name.localeCompare(b.name);
      return (isKnown(a[sort]) ? a[sort] : -Infinity) - (isKnown(b[sort]) ? b[sort] : -Infinity);
    };
    state.found.sort((a, b) => (down ? order(b, a) : order(a, b)));
    state.page = 0;
    const known = state.found.filter((row) => isKnown(row.bias));
    const lowest = known.reduce((low, row) => Math.min(low, row.accuracy, row.confidence), 0.9);
    for (const range of [figure.x_range, figure.y_range]) range.start = 10 * Math.floor(10 * lowest);
    source.data = {
      x: known.map((row) => 100 * row.accuracy),
      y: known.map((row) => 100 * row.confidence),
      color: known.map((row) => (row.bias > 0 ? numbers.theme.over : numbers.theme.under)),
    };
    byId("image-plot").hidden = !state.rows.some((row) => isKnown(row.bias));
    draw();
  }

  function draw() {
    const pages = Math.max(1, Math.ceil(state.found.length / PAGE));
    const from = state.page * PAGE;
    const rows = state.found.slice(from, from + PAGE);
    const head = columns.map(({ key, label }) => {
      const sorted = key === state.sort ? (state.down ? "descending" : "ascending") : null;
      const click = () => {
        state.down = key === state.sort ? !state.down : key !== "name";
        state.sort = key;
        select();
        byId("image-table").querySelectorAll("thead button")[columns.findIndex((c) => c.key === key)].focus();
      };
      const button = make("button", { type: "button", onclick: click }, ...unitApart(label));
      return make("th", { scope: "col", "aria-sort": sorted }, button);
    });
    const body = rows.map((row) => {
      const open = () => mark(row);
      const name = make("button", { type: "button", class: "plain", onclick: open }, row.name);
      if (hasOverlay(row.name)) name.append(make("span", { class: "drawn" }, "drawn"));
      return make(
        "tr",
        { class: row === state.at ? "marked" : null },
        make("th", { scope: "row" }, name),
        ...columns.slice(1).map(({ text }) => make("td", {}, text(row)))
      );
    });
    byId("image-table").replaceChildren(
      make("thead", {}, make("tr", {}, ...head)),
      make("tbody", {}, ...body)
    );
    const { total } = entries[Number(control("model").value)].images;
    const of = state.rows.length < total ? `, the worst of ${showCount(total)}` : "";
    byId("image-count").textContent =
      `${showCount(state.found.length)} of ${showCount(state.rows.length)} images${of}; ` +
      `page ${state.page + 1} of ${pages}`;
    byId("previous").disabled = state.page === 0;
    byId("next").disabled = state.page >= pages - 1;
  }

  // Mark an image in table and plot, and open it where it is drawn.
  function mark(row) {
    state.at = row;
    state.page = Math.max(0, Math.floor(state.found.indexOf(row) / PAGE));
    const known = row && isKnown(row.bias);
    marked.data = known
      ? { x: [100 * row.accuracy], y: [100 * row.confidence] }
      : { x: [], y: [] };
    byId("image-at").textContent = row
      ? `${row.name}: ECE ${showUnit("ece", row.ece)}, accuracy ${showUnit("accuracy", row.accuracy)}, ` +
        `mean confidence ${showUnit("mean_confidence", row.confidence)}` +
        (hasOverlay(row.name) ? "" : "; not among the images that were drawn")
      : "";
    draw();
    if (row && hasOverlay(row.name)) openOverlay(row.name, Number(control("model").value));
  }

  figure.on_event("tap", (event) => {
    const far = (row) => (100 * row.accuracy - event.x) ** 2 + (100 * row.confidence - event.y) ** 2;
    const near = state.found.filter((row) => isKnown(row.bias));
    if (near.length) mark(near.reduce((best, row) => (far(row) < far(best) ? row : best)));
  });
  const turn = (step) => () => {
    state.page += step;
    draw();
  };
  byId("previous").addEventListener("click", turn(-1));
  byId("next").addEventListener("click", turn(1));
  fillSelect(control("model"), entries.map((entry, e) => [String(e), entry.name]));
  control("model").addEventListener("change", load);
  for (const name of ["word", "least"]) control(name).addEventListener("input", select);
  control("sign").addEventListener("change", select);
  load();
}
