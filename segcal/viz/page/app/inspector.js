// Inspector: the values of each pixel of the images that were drawn, on six pictures that zoom and
// move together; two models share them, divided by a slider.

const { coding } = numbers;
const PICTURES = ["image", "labels", "prediction", "confidence", "errors", "confidence − accuracy"];
const [WRONG, RIGHT] = [[230, 97, 1], [244, 245, 247]];
const FULL_GAP = 0.5; // the gap at which the colour is full
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const [OVER, UNDER] = [rgb(numbers.theme.over), rgb(numbers.theme.under)];

async function pixelsOf(uri) {
  const picture = new Image();
  picture.src = uri;
  await picture.decode();
  const canvas = make("canvas", { width: picture.naturalWidth, height: picture.naturalHeight });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(picture, 0, 0);
  return { canvas, data: context.getImageData(0, 0, canvas.width, canvas.height).data };
}

// The values of one model: functions of the number of a pixel.
class Planes {
  constructor({ model, classes, colors: palette }, { canvas, data }) {
    this.entry = entries[model];
    this.classes = classes;
    this.palette = palette;
    this.width = canvas.width;
    this.height = canvas.height / coding.planes.length;
    const size = this.width * this.height;
    this.data = Object.fromEntries(
      coding.planes.map((name, i) => [
        name,
        Uint8Array.from({ length: size }, (_, at) => data[4 * (i * size + at)]),
      ])
    );
    const [low, high, levels] = coding.logit;
    this.levels = Array.from({ length: levels + 1 }, (_, q) => 1 / (1 + Math.exp(-(low + ((high - low) * q) / levels))));
  }
  isIgnored = (at) => this.data.label[at] === coding.ignored;
  confidence = (at) => this.levels[256 * this.data.high[at] + this.data.low[at]];
  runnerUp = (name, at) => (this.data[name][at] / coding.runnerUp) ** 2 / 2;
  gap = (at) => (this.isIgnored(at) ? NaN : (this.data.gap[at] - coding.gap[0]) / coding.gap[1]);
  isWrong = (at) => this.data.label[at] !== this.data.prediction[at];
  className(name, at) {
    const number = this.data[name][at];
    if (number === coding.ignored) return name === "label" ? "ignored" : "–";
    return number === coding.other ? "another class" : this.classes[number];
  }
  color = (name, at) => this.palette[this.data[name][at]] || [128, 128, 128];
  countIn = (bin) => this.data.label.reduce((n, _, at) => n + (!this.isIgnored(at) && this.isIn(bin, at)), 0);
  isIn(bin, at) {
    const p = this.confidence(at);
    return bin.low < p && p <= bin.high;
  }

  // A canvas of the size of the planes, painted pixel by pixel with [red, green, blue, opacity].
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

  hatched(at) {
    const grey = (Math.floor(at / this.width) + (at % this.width)) % 6 < 2 ? 184 : 214;
    return [grey, grey, grey];
  }

  pictures(image) {
    const known = (paint) => this.painted((at) => (this.isIgnored(at) ? this.hatched(at) : paint(at)));
    const pale = (at) => {
      if (!image) return 236;
      const [red, green, blue] = image.data.subarray(4 * at, 4 * at + 3);
      return 125 + (130 * (0.299 * red + 0.587 * green + 0.114 * blue)) / 255;
    };
    const gap = (at) => {
      const value = this.gap(at);
      const opacity = 0.85 * Math.min(Math.abs(value) / FULL_GAP, 1);
      const color = value > 0 ? OVER : UNDER;
      return color.map((part) => (1 - opacity) * pale(at) + opacity * part);
    };
    return {
      image: image && image.canvas,
      labels: known((at) => this.color("label", at)),
      prediction: this.painted((at) => this.color("prediction", at)),
      confidence: this.painted((at) => new Array(3).fill(255 * this.confidence(at))),
      errors: known((at) => (this.isWrong(at) ? WRONG : RIGHT)),
      "confidence − accuracy": known(gap),
    };
  }
}

class Inspector {
  constructor(item) {
    this.item = item;
    this.planes = [];
    this.view = { zoom: 1, x: 0, y: 0 }; // the pixel at the left top corner
    this.at = null; // [column, row] of the pixel that is read
    this.bin = null;
    const options = () => item.models.map(({ model }, i) => make("option", { value: i }, entries[model].name));
    this.left = make("select", {}, ...options());
    this.right = make("select", {}, ...options());
    this.right.value = Math.min(1, item.models.length - 1);
    this.split = make("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": "Where the first model ends and the second begins" });
    const several = item.models.length > 1;
    const button = (text, label, click) => make("button", { type: "button", "aria-label": label, onclick: click }, text);
    const controls = make(
      "div",
      { class: "controls" },
      button("+", "Zoom in", () => this.zoom(2)),
      button("−", "Zoom out", () => this.zoom(0.5)),
      button("whole", "Show the whole image", () => this.zoom(0)),
      make("label", { hidden: !several }, "left", this.left),
      make("label", { hidden: !several, class: "split" }, this.split),
      make("label", { hidden: !several }, "right", this.right)
    );
    this.canvases = PICTURES.filter((name) => name !== "image" || item.image).map((name) => [
      name,
      make("canvas", { role: "img", "aria-label": `${name} of ${item.name}` }),
    ]);
    this.panels = make(
      "div",
      { class: "panels", tabindex: 0, role: "application", "aria-label": `Pixels of ${item.name}: arrow keys move, plus and minus zoom` },
      ...this.canvases.map(([name, canvas]) => make("div", {}, make("p", {}, name), canvas))
    );
    this.key = make("p", { class: "key" });
    this.table = make("table", {});
    this.note = make("p", { class: "lead", "aria-live": "polite" });
    const ece = item.models.map(({ model, ece }) => `${several ? entries[model].name + " " : ""}${showUnit("ece", ece)}`);
    const size = item.step > 1 ? ` One of every ${item.step} rows and columns of ${item.size[0]} × ${item.size[1]} pixels is shown.` : "";
    this.element = make(
      "figure",
      { class: "wide inspector", tabindex: -1, "data-overlay": item.of, "data-model": item.models[0].model },
      make("figcaption", {}, make("b", {}, item.name), `ECE of this ${item.name === item.of ? "image" : "part"} ${ece.join(", ")}.${size}`),
      controls,
      this.panels,
      this.key,
      this.note,
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Values of the pixel" }, this.table)
    );
    controls.addEventListener("input", () => this.draw());
    controls.addEventListener("change", () => this.tell());
    this.listen();
  }

  async load() {
    const { item } = this;
    const image = item.image ? await pixelsOf(item.image) : null;
    for (const model of item.models) {
      const planes = new Planes(model, await pixelsOf(model.planes));
      planes.drawn = planes.pictures(image);
      this.planes.push(planes);
    }
    const [{ width, height }] = this.planes;
    [this.width, this.height] = [width, height];
    this.panels.style.setProperty("--shape", `${width} / ${height}`);
    const key = new Map(); // the colour of each class that is seen; each model has its own numbers
    for (const { data, classes, palette } of this.planes) {
      const seen = new Set([...data.label, ...data.prediction]);
      classes.forEach((name, i) => seen.has(i) && key.set(name, palette[i]));
    }
    const swatches = [...key].map(([name, color]) =>
      make("span", {}, make("span", { class: "swatch", style: `--color:rgb(${color})` }), name)
    );
    this.key.replaceChildren(...swatches);
    this.setBin(this.bin);
    new ResizeObserver(() => this.draw()).observe(this.panels);
  }

  setBin(bin) {
    this.bin = bin;
    if (!this.planes.length) return;
    for (const planes of this.planes) {
      planes.veil = bin && planes.painted((at) => [128, 128, 128, planes.isIgnored(at) || !planes.isIn(bin, at) ? 215 : 0]);
    }
    this.tell();
    this.draw();
  }

  // How many pixels of the models that are shown lie in the chosen bin.
  tell() {
    const count = (planes) => `${planes.entry.name}: ${showCount(planes.countIn(this.bin))} pixels of this image in the bin`;
    this.note.textContent = this.bin && this.planes.length ? this.shown().map(count).join("; ") : "";
  }

  shown() {
    const [left, right] = [this.left, this.right].map((select) => this.planes[Number(select.value)]);
    return left === right ? [left] : [left, right];
  }

  draw() {
    if (!this.planes.length) return;
    const [left, right = left] = this.shown();
    const { zoom, x, y } = this.view;
    const [w, h] = [this.width / zoom, this.height / zoom];
    for (const [name, canvas] of this.canvases) {
      const scale = Math.min(devicePixelRatio, 2);
      canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
      canvas.height = Math.max(1, Math.round((canvas.width * this.height) / this.width));
      const context = canvas.getContext("2d");
      const show = (source) => context.drawImage(source, x, y, w, h, 0, 0, canvas.width, canvas.height);
      const half = (planes, from, to) => {
        context.save();
        context.beginPath();
        context.rect(from * canvas.width, 0, (to - from) * canvas.width, canvas.height);
        context.clip();
        context.imageSmoothingEnabled = name === "image" && zoom === 1;
        show(planes.drawn[name]);
        if (planes.veil) show(planes.veil);
        context.restore();
      };
      const split = left === right ? 1 : Number(this.split.value) / 100;
      half(left, 0, split);
      half(right, split, 1);
      context.fillStyle = "#fff";
      if (split > 0 && split < 1) context.fillRect(split * canvas.width - 1, 0, 2, canvas.height);
      if (this.at) this.drawCursor(context, canvas.width / w);
    }
    this.read();
  }

  drawCursor(context, size) {
    const [column, row] = this.at;
    const [x, y] = [(column - this.view.x) * size, (row - this.view.y) * size];
    const room = Math.max(0, 7 - size / 2);
    for (const [color, width] of [["#000", 4], ["#fff", 2]]) {
      context.strokeStyle = color;
      context.lineWidth = width;
      context.strokeRect(x - room, y - room, size + 2 * room, size + 2 * room);
    }
  }

  read() {
    if (!this.at) {
      this.table.replaceChildren();
      return;
    }
    const [column, row] = this.at;
    const at = row * this.width + column;
    const share = (p) => (p < 0.01 ? "< 1 %" : `${Math.round(100 * p)} %`);
    const other = (planes, name, p) => {
      const found = planes.className(name, at);
      return found === "–" ? found : `${found} ${share(planes.runnerUp(p, at))}`;
    };
    const rows = this.shown().map((planes) => [
      named(planes.entry),
      planes.className("label", at),
      planes.className("prediction", at),
      showConfidence(planes.confidence(at)),
      other(planes, "second", "p2"),
      other(planes, "third", "p3"),
      show("bias", planes.gap(at)),
    ]);
    const place = `pixel ${column * this.item.step}, ${row * this.item.step}`;
    fillTable(this.table, [place, "label", "prediction", "confidence", "second", "third", `local gap (${numbers.scores.bias.unit})`], rows);
  }

  pointAt(column, row) {
    const inside = (value, size) => Math.max(0, Math.min(size - 1, value));
    this.at = [inside(column, this.width), inside(row, this.height)];
    const { zoom } = this.view;
    const reach = (start, value, size) => Math.max(Math.min(start, value), value + 1 - size / zoom);
    this.move(reach(this.view.x, this.at[0], this.width), reach(this.view.y, this.at[1], this.height));
  }

  move(x, y) {
    const { zoom } = this.view;
    const within = (value, size) => Math.max(0, Math.min(value, size - size / zoom));
    Object.assign(this.view, { x: within(x, this.width), y: within(y, this.height) });
    this.draw();
  }

  // Around the pixel that is read, or the middle; a factor of 0 shows all.
  zoom(factor) {
    const old = this.view.zoom;
    const zoom = factor ? Math.max(1, Math.min(32, old * factor)) : 1;
    const [column, row] = this.at || [this.view.x + this.width / old / 2, this.view.y + this.height / old / 2];
    this.view.zoom = zoom;
    this.panels.classList.toggle("zoomed", zoom > 1);
    this.move(column - ((column - this.view.x) * old) / zoom, row - ((row - this.view.y) * old) / zoom);
  }

  listen() {
    let held = null;
    const placeOf = (event) => {
      const box = event.target.getBoundingClientRect();
      const { zoom, x, y } = this.view;
      return [
        x + ((event.clientX - box.left) / box.width) * (this.width / zoom),
        y + ((event.clientY - box.top) / box.height) * (this.height / zoom),
      ];
    };
    const isPicture = (event) => event.target.tagName === "CANVAS" && this.planes.length > 0;
    this.panels.addEventListener("pointerdown", (event) => {
      if (!isPicture(event)) return;
      held = placeOf(event);
      this.pointAt(...held.map(Math.floor));
    });
    this.panels.addEventListener("pointermove", (event) => {
      if (!isPicture(event)) return;
      const [x, y] = placeOf(event);
      if (held && this.view.zoom > 1) this.move(this.view.x + held[0] - x, this.view.y + held[1] - y);
      else this.pointAt(Math.floor(x), Math.floor(y));
    });
    addEventListener("pointerup", () => (held = null));
    addEventListener("pointercancel", () => (held = null));
    this.panels.addEventListener("wheel", (event) => {
      if (!event.ctrlKey || !isPicture(event)) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 2 : 0.5);
    }, { passive: false });
    this.panels.addEventListener("keydown", (event) => {
      if (!this.planes.length) return;
      const [column, row] = this.at || [Math.floor(this.width / 2), Math.floor(this.height / 2)];
      const step = event.shiftKey ? 10 : 1;
      const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
      if (event.key in moves) this.pointAt(column + moves[event.key][0], row + moves[event.key][1]);
      else if (event.key === "+" || event.key === "=") this.zoom(2);
      else if (event.key === "-") this.zoom(0.5);
      else if (event.key === "0") this.zoom(0);
      else return;
      event.preventDefault();
    });
  }
}

const inspectors = numbers.inspected.map((item) => new Inspector(item));
if (inspectors.length) {
  byId("inspector").append(...inspectors.map((each) => each.element));
  binListeners.push((bin) => inspectors.forEach((each) => each.setBin(bin)));
  // One after the other, each when the page has nothing else to do.
  const idle = () => new Promise((done) => (window.requestIdleCallback || setTimeout)(done)); // Safari lacks the first
  inspectors.reduce((done, each) => done.then(idle).then(() => each.load()), Promise.resolve());
}
