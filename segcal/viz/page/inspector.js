// Pixels: six pictures of each drawn image, which zoom together, and the values of one pixel.

const { coding, theme } = numbers;
const PICTURES = ["image", "labels", "prediction", "confidence", "errors", "confidence − accuracy"];
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const [OVER, UNDER, WRONG, RIGHT] = ["over", "under", "wrong", "right"].map((name) => rgb(theme[name]));

async function pixelsOf(uri) {
  const picture = new Image();
  picture.src = uri;
  await picture.decode();
  const canvas = make("canvas", { width: picture.naturalWidth, height: picture.naturalHeight });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(picture, 0, 0);
  return { canvas, data: context.getImageData(0, 0, canvas.width, canvas.height).data };
}

// The pixels of one image under one model.
class Planes {
  constructor({ model, classes, colors: palette }, { canvas, data }, image) {
    Object.assign(this, { entry: entries[model], classes, palette, width: canvas.width, height: canvas.height / 4 });
    const size = this.width * this.height;
    const value = (plane) => (at) => data[4 * (plane * size + at)];
    [this.label, this.predicted] = [value(0), value(1)];
    this.confidence = (at) => 1 - (value(2)(at) / 255) ** 2;
    this.gap = (at) => (value(3)(at) - coding.gap[0]) / coding.gap[1];
    this.isIgnored = (at) => this.label(at) === coding.ignored;
    const known = (paint) => this.painted((at) => (this.isIgnored(at) ? this.hatched(at) : paint(at)));
    const color = (slot) => palette[slot] || [128, 128, 128];
    const pale = (at) => (image ? 125 + (130 * (0.299 * image.data[4 * at] + 0.587 * image.data[4 * at + 1] + 0.114 * image.data[4 * at + 2])) / 255 : 236);
    this.pictures = {
      image: image && image.canvas,
      labels: known((at) => color(this.label(at))),
      prediction: this.painted((at) => color(this.predicted(at))),
      confidence: this.painted((at) => new Array(3).fill(255 * this.confidence(at))),
      errors: known((at) => (this.label(at) === this.predicted(at) ? RIGHT : WRONG)),
      "confidence − accuracy": known((at) => {
        const gap = this.gap(at);
        const opacity = 0.85 * Math.min(Math.abs(gap) / 0.5, 1);
        return (gap > 0 ? OVER : UNDER).map((part) => (1 - opacity) * pale(at) + opacity * part);
      }),
    };
  }
  hatched = (at) => new Array(3).fill((Math.floor(at / this.width) + (at % this.width)) % 6 < 2 ? 184 : 214);
  className(slot) {
    return slot === coding.ignored ? "not counted" : slot === coding.other ? "another class" : this.classes[slot];
  }

  // A canvas painted pixel by pixel with [red, green, blue, opacity].
  painted(paint) {
    const canvas = make("canvas", { width: this.width, height: this.height });
    const context = canvas.getContext("2d");
    const found = context.createImageData(this.width, this.height);
    for (let at = 0; at < this.width * this.height; at++) {
      const [red, green, blue, opacity = 255] = paint(at);
      found.data.set([red, green, blue, opacity], 4 * at);
    }
    context.putImageData(found, 0, 0);
    return canvas;
  }

  // What hides the pixels outside a bin of confidence.
  veil(bin) {
    const isIn = (at) => !this.isIgnored(at) && bin.low < this.confidence(at) && this.confidence(at) <= bin.high;
    return bin && this.painted((at) => [128, 128, 128, isIn(at) ? 0 : 215]);
  }
}

class Inspector {
  constructor(item) {
    Object.assign(this, { item, planes: [], zoom: 1, at: null, bin: null });
    this.select = make("select", {}, ...item.models.map(({ model }, i) => make("option", { value: i }, entries[model].name)));
    const button = (text, label, factor) => make("button", { type: "button", "aria-label": label, onclick: () => this.setZoom(this.zoom * factor) }, text);
    const controls = make(
      "div",
      { class: "controls" },
      make("label", { hidden: item.models.length < 2 }, "model", this.select),
      button("+", "Zoom in", 2),
      button("−", "Zoom out", 0.5)
    );
    this.marks = [];
    this.canvases = PICTURES.filter((name) => name !== "image" || item.image).map((name) => {
      const canvas = make("canvas", { role: "img", "aria-label": `${name} of ${item.name}` });
      const mark = make("span", { class: "mark", hidden: true });
      this.marks.push(mark);
      return [name, canvas, make("div", {}, make("p", {}, name), make("div", { class: "view" }, make("div", { class: "layer" }, canvas, mark)))];
    });
    const panels = { class: "panels", tabindex: 0, role: "application", "aria-label": `Pixels of ${item.name}: arrow keys move, plus and minus zoom` };
    this.panels = make("div", panels, ...this.canvases.map(([, , box]) => box));
    this.key = make("p", { class: "key" });
    this.table = make("table", {});
    const eces = item.models.map(({ model, ece }) => `${item.models.length > 1 ? `${entries[model].name} ` : ""}${showUnit("ece", ece)}`);
    const size = item.step > 1 ? ` Shown is every ${item.step === 2 ? "second" : `${item.step}th`} row and column of ${item.size[0]} × ${item.size[1]} pixels.` : "";
    this.element = make(
      "figure",
      { class: "wide inspector", tabindex: -1, "data-overlay": item.of, "data-model": item.models[0].model },
      make("figcaption", {}, make("b", {}, item.name), `ECE ${eces.join(", ")}.${size}`),
      controls,
      this.panels,
      this.key,
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Values of the pixel" }, this.table)
    );
    this.select.addEventListener("change", () => this.draw());
    this.listen();
  }

  async load() {
    const image = this.item.image ? await pixelsOf(this.item.image) : null;
    for (const model of this.item.models) this.planes.push(new Planes(model, await pixelsOf(model.planes), image));
    [this.width, this.height] = [this.planes[0].width, this.planes[0].height];
    this.panels.classList.toggle("few", Math.max(this.width, this.height) < 200); // drawn without smoothing
    const key = new Map(); // each model numbers the classes that it has
    for (const { classes, palette } of this.planes) classes.forEach((name, i) => key.set(name, palette[i]));
    const swatches = [...key].map(([name, color]) => make("span", {}, make("span", { class: "swatch", style: `--color:rgb(${color})` }), name));
    this.key.replaceChildren(...swatches);
    this.draw();
  }

  draw() {
    if (!this.planes.length) return;
    const shown = this.planes[Number(this.select.value)];
    const veil = this.bin && shown.veil(this.bin);
    for (const [name, canvas] of this.canvases) {
      [canvas.width, canvas.height] = [this.width, this.height];
      const context = canvas.getContext("2d");
      context.drawImage(shown.pictures[name], 0, 0, this.width, this.height);
      if (veil) context.drawImage(veil, 0, 0);
    }
    this.read();
  }

  read() {
    this.marks.forEach((mark) => (mark.hidden = !this.at));
    if (!this.at) return;
    const [column, row] = this.at;
    const [x, y] = [(100 * (column + 0.5)) / this.width, (100 * (row + 0.5)) / this.height];
    for (const [name, value] of Object.entries({ x: `${x}%`, y: `${y}%`, zoom: this.zoom })) this.panels.style.setProperty(`--${name}`, value);
    const at = row * this.width + column;
    const rows = this.planes.map((planes) => [
      named(planes.entry),
      planes.className(planes.label(at)),
      planes.className(planes.predicted(at)),
      `${(100 * planes.confidence(at)).toFixed(1)}`,
      planes.isIgnored(at) ? "–" : show("bias", planes.gap(at)),
    ]);
    const place = `pixel ${column * this.item.step}, ${row * this.item.step}`;
    fillTable(this.table, [place, "label", "prediction", "confidence (%)", heading("bias")], rows);
  }

  setZoom(zoom) {
    this.zoom = Math.max(1, Math.min(16, zoom));
    this.panels.classList.toggle("zoomed", this.zoom > 1);
    this.pointAt(...(this.at || [this.width / 2, this.height / 2]));
  }

  pointAt(x, y) {
    const inside = (value, size) => Math.max(0, Math.min(size - 1, Math.floor(value)));
    this.at = [inside(x, this.width), inside(y, this.height)];
    this.read();
  }

  listen() {
    const point = (event) => {
      if (event.target.tagName !== "CANVAS" || !this.planes.length) return;
      const box = event.target.getBoundingClientRect();
      this.pointAt(((event.clientX - box.left) / box.width) * this.width, ((event.clientY - box.top) / box.height) * this.height);
    };
    // A zoomed picture moves with the pixel that is read, so there a click tells which one.
    this.panels.addEventListener("pointermove", (event) => this.zoom === 1 && point(event));
    this.panels.addEventListener("pointerdown", point);
    this.panels.addEventListener("keydown", (event) => {
      if (!this.planes.length) return;
      const [column, row] = this.at || [this.width / 2, this.height / 2];
      const step = event.shiftKey ? 10 : 1;
      const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
      if (event.key in moves) this.pointAt(column + moves[event.key][0], row + moves[event.key][1]);
      else if (event.key === "+" || event.key === "=") this.setZoom(2 * this.zoom);
      else if (event.key === "-") this.setZoom(this.zoom / 2);
      else return;
      event.preventDefault();
    });
  }
}

const inspectors = numbers.inspected.map((item) => new Inspector(item));
if (inspectors.length) {
  byId("inspector").append(...inspectors.map((each) => each.element));
  binListeners.push((bin) => inspectors.forEach((each) => Object.assign(each, { bin }).draw()));
  // One after the other, each when the page has nothing else to do.
  const idle = () => new Promise((done) => (window.requestIdleCallback || setTimeout)(done)); // Safari lacks the first
  inspectors.reduce((done, each) => done.then(idle).then(() => each.load()), Promise.resolve());
}
