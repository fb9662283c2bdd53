/** The model as a graph on a canvas: modules open and close, colours say the error or the format. */

import { choice, h } from "./dom.js";
import { fixed, likeness, percent, round } from "./numbers.js";
import { formatClass, shortFormat } from "./operators.js";
import { pack, secondLine } from "./packing.js";
import { errorClass, limitOf, relativeError } from "./report.js";
import { go, place } from "./route.js";
import { colour } from "./settings.js";
import { t } from "./text.js";

/** @typedef {import("./report.js").Report} Report */
/** @typedef {import("./report.js").Run} Run */
/** @typedef {import("./report.js").Operator} Operator */
/** @typedef {import("./packing.js").Drawn} Drawn */
/** @typedef {import("./packing.js").Drawing} Drawing */

const NEAREST = 3;
const FARTHEST = 0.02;
/** So many operators are shown open at first. */
const OPEN_AT_FIRST = 30;

/** Changes in dB, from worse to better, with the colours of errors. */
const CHANGES = [-6, -1, 1, 6];
const CHANGE_COLOURS = [4, 3, 2, 1, 0];

/** What the reader chose; it outlasts a change of language. */
const chosen = { colours: "error", run: 0 };

/** @param {Report} report @param {string} task */
export function graphView(report, task) {
  const graph = new Graph(report, limitOf(task));
  return { element: graph.element, update: () => graph.update(), focus: () => graph.canvas.focus() };
}

class Graph {
  /** @param {Report} report @param {number} limit */
  constructor(report, limit) {
    this.report = report;
    this.limit = limit;
    this.x = 0;
    this.y = 0;
    this.zoom = 1;
    this.isFitted = false;
    /** @type {Drawn | null} */
    this.hovered = null;
    /** The box or operator that the keyboard is on. @type {{kind: string, target: number} | null} */
    this.focused = null;
    this.isDrawing = false;
    this.shown = "";
    /** @type {Drawn | null} */
    this.toCentre = null;
    /** Boxes that are open. @type {Set<number>} */
    this.open = new Set();
    /** Boxes around each operator, from the outside. @type {Map<number, number[]>} */
    this.around = new Map();
    /** Operators in each box, at any depth. @type {number[][]} */
    this.within = [];
    /** @type {Drawing} */
    this.drawing = { nodes: [], edges: [], width: 0, height: 0 };
    /** Of the style sheet, by name. @type {Record<string, string>} */
    this.colours = {};
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": t("graph-label"), "aria-describedby": "graph-status" });
    this.context = this.canvas.getContext("2d");
    this.tip = h("div", { class: "tip", id: "graph-tip", hidden: true });
    this.status = h("p", { class: "hidden", id: "graph-status", role: "status" });
    this.legend = h("div", { class: "legend" });
    this.holder = h("div", { class: "graph" }, this.canvas, this.tip);
    const button = (/** @type {string} */ id, /** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ act) => h("button", { type: "button", id, title: label, "aria-label": label, onclick: act }, text);
    this.element = h(
      "div", { class: "view fixed" },
      h("div", { class: "toolbar" },
        report.isDiff && choice(t("run"), report.runs.map((run) => [String(run.position), run.label]), String(chosen.run), (value) => { chosen.run = Number(value); this.useRun(); }, { id: "graph-run" }),
        choice(t("colours"), [["error", t("colour-error")], ["own", t("colour-own")], ["format", t("colour-format")], ...(report.isDiff ? [/** @type {[string, string]} */ (["change", t("colour-change")])] : [])], chosen.colours, (value) => { chosen.colours = value; this.drawLegend(); this.schedule(); }, { id: "graph-colours" }),
        button("graph-open", t("open-all"), t("open-all"), () => this.openAll()),
        button("graph-close", t("close-all"), t("close-all"), () => { this.open.clear(); this.repack(true); }),
        button("graph-in", "+", t("zoom-in"), () => this.zoomBy(1.3)),
        button("graph-out", "−", t("zoom-out"), () => this.zoomBy(1 / 1.3)),
        button("graph-fit", t("fit"), t("fit"), () => this.fit(true)),
        h("span", { class: "spring" }), this.legend),
      this.holder, this.status);
    this.listen();
    this.useRun();
  }

  get run() {
    return this.report.runs[Math.min(chosen.run, this.report.runs.length - 1)];
  }

  /** The run that changes are counted from. */
  get other() {
    const { runs } = this.report;
    return this.run === runs[0] ? runs[runs.length - 1] : runs[0];
  }

  /** By how many dB this run is better than the other. @param {Operator} operator */
  changeOf(operator) {
    const other = this.other.byKey.get(operator.key);
    if (!other || other.sqnr === null || operator.sqnr === null) return null;
    return operator.sqnr === other.sqnr ? 0 : operator.sqnr - other.sqnr;
  }

  useRun() {
    const { run } = this;
    this.focused = null;
    this.around = new Map();
    this.within = run.boxes.map(() => []);
    const walk = (/** @type {number} */ at, /** @type {number[]} */ above) => {
      for (const [kind, target] of run.boxes[at].members) {
        if (kind === "box") walk(target, [...above, target]);
        if (kind === "operator") {
          this.around.set(target, above);
          for (const box of above) this.within[box].push(target);
        }
      }
    };
    walk(0, []);
    this.open = this.openAtFirst();
    this.shown = "";
    this.repack(true);
    this.drawLegend();
    this.update();
  }

  /** The outer boxes, as long as there is not too much to see. */
  openAtFirst() {
    /** @type {Set<number>} */
    const open = new Set();
    let seen = visible(this.run, 0);
    const waiting = boxesIn(this.run, 0);
    while (waiting.length) {
      const box = /** @type {number} */ (waiting.shift());
      const more = visible(this.run, box) - 1;
      if (seen + more > OPEN_AT_FIRST) continue;
      seen += more;
      open.add(box);
      waiting.push(...boxesIn(this.run, box));
    }
    return open;
  }

  openAll() {
    this.open = new Set(this.run.boxes.keys());
    this.open.delete(0);
    this.repack(true);
  }

  /** Follow the address: the operator in view is opened to, and in the middle. */
  update() {
    const key = place().op;
    const operator = key === null ? undefined : this.run.byKey.get(key);
    if (key !== null && operator && this.shown !== key) {
      this.shown = key;
      this.focused = { kind: "operator", target: operator.index };
      for (const box of this.around.get(operator.index) ?? []) this.open.add(box);
      this.repack(false);
      const node = this.find("operator", operator.index);
      if (node && this.canvas.clientWidth) this.centre(node);
      else this.toCentre = node;
    }
    if (key === null) this.shown = "";
    this.schedule();
  }

  /** @param {boolean} fit */
  repack(fit) {
    this.drawing = pack(this.run, this.open);
    this.hovered = null;
    if (fit) this.isFitted = false;
    this.schedule();
  }

  /** @param {string} kind @param {number} target */
  find(kind, target) {
    return this.drawing.nodes.find((node) => node.kind === kind && node.target === target) ?? null;
  }

  // What is looked at

  /** @param {boolean} [isWhole] all of it, however small; else it stays readable and starts at its top */
  fit(isWhole = false) {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!width || !height) return;
    const whole = Math.min(width / (this.drawing.width + 40), height / (this.drawing.height + 40));
    const readable = Math.min(0.85, width / (this.drawing.width + 40));
    this.zoom = Math.max(FARTHEST, Math.min(1.2, isWhole ? whole : Math.max(whole, readable)));
    this.x = (width - this.drawing.width * this.zoom) / 2;
    const spare = height - this.drawing.height * this.zoom;
    this.y = spare > 0 ? spare / 2 : 16;
    this.isFitted = true;
    this.schedule();
  }

  /** @param {Drawn} node */
  centre(node) {
    this.zoom = Math.max(this.zoom, 0.8);
    this.x = this.canvas.clientWidth / 2 - (node.x + node.width / 2) * this.zoom;
    this.y = this.canvas.clientHeight / 2 - (node.y + Math.min(node.height, 40) / 2) * this.zoom;
    this.isFitted = true;
    this.schedule();
  }

  /** @param {number} factor @param {number} [atX] @param {number} [atY] */
  zoomBy(factor, atX = this.canvas.clientWidth / 2, atY = this.canvas.clientHeight / 2) {
    const next = Math.max(FARTHEST, Math.min(NEAREST, this.zoom * factor));
    this.x = atX - ((atX - this.x) * next) / this.zoom;
    this.y = atY - ((atY - this.y) * next) / this.zoom;
    this.zoom = next;
    this.schedule();
  }

  /** The innermost thing at a point. @param {number} x @param {number} y @returns {Drawn | null} */
  at(x, y) {
    const [px, py] = [(x - this.x) / this.zoom, (y - this.y) / this.zoom];
    let found = null;
    for (const node of this.drawing.nodes) {
      const isIn = px >= node.x && px <= node.x + node.width && py >= node.y && py <= node.y + node.height;
      if (isIn && (!found || node.depth >= found.depth)) found = node;
    }
    return found;
  }

  // What the reader does

  listen() {
    const { canvas } = this;
    /** @type {{x: number, y: number, far: boolean} | null} */
    let drag = null;
    canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
      drag = { x: event.clientX, y: event.clientY, far: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
      if (drag) {
        const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
        if (drag.far || Math.abs(dx) + Math.abs(dy) > 4) {
          this.x += dx;
          this.y += dy;
          drag = { x: event.clientX, y: event.clientY, far: true };
          this.schedule();
        }
        return;
      }
      this.hover(this.at(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
    });
    canvas.addEventListener("pointerup", (/** @type {PointerEvent} */ event) => {
      const wasClick = drag && !drag.far;
      drag = null;
      if (wasClick) this.activate(this.at(event.offsetX, event.offsetY));
    });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointerleave", () => this.hover(null, 0, 0));
    canvas.addEventListener("wheel", (/** @type {WheelEvent} */ event) => {
      event.preventDefault();
      this.zoomBy(Math.exp(-event.deltaY * 0.0015), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.key(event));
    canvas.addEventListener("focus", () => this.schedule());
    canvas.addEventListener("blur", () => this.schedule());
    new ResizeObserver(() => {
      if (!this.isFitted) this.fit();
      if (this.toCentre) this.centre(this.toCentre);
      this.toCentre = null;
      this.draw();
    }).observe(this.holder);
  }

  /** Open or close a box, choose an operator. @param {Drawn | null} node */
  activate(node) {
    if (!node) return;
    this.focused = { kind: node.kind, target: node.target };
    if (node.kind === "operator") {
      this.shown = this.run.operators[node.target].key;
      go({ op: this.shown, view: "graph" });
      this.schedule();
      return;
    }
    const before = { x: node.x + node.width / 2, y: node.y };
    if (this.open.has(node.target)) this.open.delete(node.target);
    else this.open.add(node.target);
    this.repack(false);
    // What was clicked stays under the pointer.
    const after = this.find("box", node.target);
    if (after) {
      this.x += (before.x - after.x - after.width / 2) * this.zoom;
      this.y += (before.y - after.y) * this.zoom;
    }
    this.tell();
  }

  /** @param {Drawn | null} node @param {number} x @param {number} y */
  hover(node, x, y) {
    this.hovered = node;
    this.canvas.style.cursor = node ? "pointer" : "grab";
    this.tip.hidden = !node;
    if (node) {
      this.tip.replaceChildren(...this.lines(node).map((line, at) => h("p", { class: at ? null : "name" }, line)));
      const width = this.holder.clientWidth;
      Object.assign(this.tip.style, { left: `${Math.min(x + 14, Math.max(0, width - this.tip.offsetWidth - 8))}px`, top: `${Math.min(y + 14, Math.max(0, this.holder.clientHeight - this.tip.offsetHeight - 8))}px` });
    }
    this.schedule();
  }

  /** What is said of a node. @param {{kind: string, target: number}} node */
  lines(node) {
    const { run } = this;
    if (node.kind === "operator") {
      const operator = run.operators[node.target];
      const name = run.document.similarity_function || t("similarity");
      return [
        operator.key, [operator.type, operator.line].filter(Boolean).join(" · "),
        `${t("format")}: ${operator.format ? shortFormat(operator.format) : "–"}`,
        `${name}: ${likeness(operator.similarity)}`, `${t("sqnr")}: ${fixed(operator.sqnr, 2)} dB`,
        `${t("relative-error")}: ${percent(relativeError(operator))}`,
      ].filter(Boolean);
    }
    const operators = this.within[node.target].map((index) => run.operators[index]);
    const worst = worstOf(operators);
    return [
      run.boxes[node.target].path, t("operators-inside", { count: operators.length }),
      worst ? `${t("worst")}: ${worst.key}, ${t("relative-error")} ${percent(relativeError(worst))}` : "",
      this.open.has(node.target) ? t("click-to-close") : t("click-to-open"),
    ].filter(Boolean);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const focused = this.focused && this.find(this.focused.kind, this.focused.target);
    if (event.key === "+" || event.key === "=") this.zoomBy(1.3);
    else if (event.key === "-") this.zoomBy(1 / 1.3);
    else if (event.key === "0") this.fit(true);
    else if (event.key.startsWith("Arrow")) this.move(focused, event.key);
    else if (event.key === "Enter" || event.key === " ") this.activate(focused);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** To the nearest node in a direction. @param {Drawn | null} from @param {string} key */
  move(from, key) {
    const { nodes } = this.drawing;
    if (!nodes.length) return;
    let next = from ? null : nodes[0];
    if (from) {
      const isVertical = key === "ArrowUp" || key === "ArrowDown";
      const sign = key === "ArrowDown" || key === "ArrowRight" ? 1 : -1;
      const middle = (/** @type {Drawn} */ node) => [node.x + node.width / 2, node.y + (node.isOpen ? 10 : node.height / 2)];
      const [fx, fy] = middle(from);
      let best = Infinity;
      for (const node of nodes) {
        const [nx, ny] = middle(node);
        const along = (isVertical ? ny - fy : nx - fx) * sign;
        const across = Math.abs(isVertical ? nx - fx : ny - fy);
        if (node !== from && along > 1 && along + 2 * across < best) {
          best = along + 2 * across;
          next = node;
        }
      }
    }
    if (!next) return;
    this.focused = { kind: next.kind, target: next.target };
    const left = next.x * this.zoom + this.x;
    const top = next.y * this.zoom + this.y;
    const isIn = left >= 0 && top >= 0 && left + next.width * this.zoom <= this.canvas.clientWidth && top + 40 <= this.canvas.clientHeight;
    if (!isIn) this.centre(next);
    this.tell();
  }

  /** To those who do not see the canvas. */
  tell() {
    if (this.focused) this.status.textContent = this.lines(this.focused).join(". ");
    this.schedule();
  }

  // What is drawn

  schedule() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      if (!this.isFitted) this.fit();
      this.draw();
    });
  }

  drawLegend() {
    const { limit } = this;
    const ends = [limit / 10, limit / 3, limit, limit * 2];
    const classes = [...ends.map((end) => `≤ ${round(end)}`), `> ${round(ends[3])}`];
    const formats = [...new Set(this.run.operators.map((operator) => formatClass(operator.format)))];
    if (chosen.colours === "change") {
      const texts = ["< −6 dB", "< −1 dB", "± 1 dB", "> 1 dB", "> 6 dB"];
      this.legend.replaceChildren(
        h("span", { class: "quiet" }, t("change-against", { run: this.other.label })),
        ...texts.map((text, at) => h("span", { class: `key e${CHANGE_COLOURS[at]}` }, text)), h("span", { class: "key e-1" }, t("no-value")));
      return;
    }
    const keys = chosen.colours === "format"
      ? formats.map((name) => h("span", { class: `key ${name}` }, name === "f-other" ? t("unknown-format") : name.slice(2)))
      : [...classes.map((text, at) => h("span", { class: `key e${at}` }, text)), h("span", { class: "key e-1" }, t("no-value"))];
    this.legend.replaceChildren(h("span", { class: "quiet" }, chosen.colours === "format" ? t("format") : chosen.colours === "own" ? t("own-error") : t("relative-error")), ...keys);
  }

  /** The colours of a node. @param {Drawn} node @returns {[string, string]} of the area and of its text */
  coloursOf(node) {
    const operators = node.kind === "operator" ? [this.run.operators[node.target]] : this.within[node.target].map((index) => this.run.operators[index]);
    if (chosen.colours === "format") {
      const names = new Set(operators.map((operator) => formatClass(operator.format)));
      if (names.size > 1) return [this.palette("panel"), this.palette("text")];
      const [name] = names;
      return [this.palette(name), this.palette(`${name}-text`)];
    }
    if (chosen.colours === "change") {
      const changes = operators.map((operator) => this.changeOf(operator)).filter((value) => value !== null);
      if (!changes.length) return [this.palette("e-1"), this.palette("e-1-text")];
      const largest = changes.reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most), 0);
      const name = `e${CHANGE_COLOURS[CHANGES.filter((end) => largest > end).length]}`;
      return [this.palette(name), this.palette(`${name}-text`)];
    }
    let worst = -1;
    for (const operator of operators) worst = Math.max(worst, errorClass(chosen.colours === "own" ? operator.own : relativeError(operator), this.limit));
    return [this.palette(`e${worst}`), this.palette(`e${worst}-text`)];
  }

  /** @param {string} name */
  palette(name) {
    return (this.colours[name] ??= colour(name));
  }

  draw() {
    const { canvas, context, drawing } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width || !height) return;
    const sharp = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * sharp) || canvas.height !== Math.round(height * sharp)) {
      canvas.width = Math.round(width * sharp);
      canvas.height = Math.round(height * sharp);
    }
    context.setTransform(sharp, 0, 0, sharp, 0, 0);
    context.clearRect(0, 0, width, height);
    context.setTransform(sharp * this.zoom, 0, 0, sharp * this.zoom, sharp * this.x, sharp * this.y);
    const view = { left: -this.x / this.zoom, top: -this.y / this.zoom, right: (width - this.x) / this.zoom, bottom: (height - this.y) / this.zoom };
    const isSeen = (/** @type {Drawn} */ node) => node.x < view.right && node.x + node.width > view.left && node.y < view.bottom && node.y + node.height > view.top;
    for (const node of drawing.nodes) if (node.isOpen && isSeen(node)) this.drawBox(node);
    this.drawEdges(view);
    if (this.zoom >= 0.3) for (const node of drawing.nodes) if (node.isOpen && isSeen(node)) this.drawTitle(node);
    for (const node of drawing.nodes) if (!node.isOpen && isSeen(node)) this.drawNode(node);
    const focused = this.focused && this.find(this.focused.kind, this.focused.target);
    if (focused) this.drawFrame(focused, this.palette("focus"), document.activeElement === canvas ? 3.5 : 2.5);
    if (this.hovered && this.hovered !== focused) this.drawFrame(this.hovered, this.palette("text"), 1.5);
  }

  /** @param {Drawn} node */
  drawBox(node) {
    const { context } = this;
    context.beginPath();
    context.roundRect(node.x, node.y, node.width, node.height, 8);
    context.fillStyle = this.palette(node.depth % 2 ? "box-odd" : "box-even");
    context.fill();
    context.lineWidth = 1;
    context.strokeStyle = this.palette("line");
    context.stroke();
  }

  /** The name of an open box, on top of the edges that pass it. @param {Drawn} node */
  drawTitle(node) {
    const { context } = this;
    context.font = "600 12px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.lineWidth = 5;
    context.lineJoin = "round";
    context.strokeStyle = this.palette(node.depth % 2 ? "box-odd" : "box-even");
    context.strokeText(`▾ ${node.label}`, node.x + 10, node.y + 15);
    context.fillStyle = this.palette("quiet");
    context.fillText(`▾ ${node.label}`, node.x + 10, node.y + 15);
  }

  /** @param {Drawn} node */
  drawNode(node) {
    const { context } = this;
    const [area, text] = this.coloursOf(node);
    if (node.kind === "box" && this.zoom > 0.3) {
      // A stack: there is more inside.
      context.beginPath();
      context.roundRect(node.x + 4, node.y + 4, node.width, node.height, 6);
      context.fillStyle = this.palette("line");
      context.fill();
    }
    context.beginPath();
    context.roundRect(node.x, node.y, node.width, node.height, node.kind === "box" ? 6 : 10);
    context.fillStyle = area;
    context.fill();
    context.lineWidth = 1;
    context.strokeStyle = this.palette("edge");
    context.stroke();
    if (this.zoom < 0.3) return;
    context.fillStyle = text;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const isOperator = node.kind === "operator";
    const operator = isOperator ? this.run.operators[node.target] : null;
    const middle = node.x + node.width / 2;
    context.font = `${isOperator ? 500 : 600} 12px system-ui, sans-serif`;
    context.fillText(cut(isOperator ? node.label : `▸ ${node.label}`, node.width), middle, node.y + 12);
    context.font = "10px system-ui, sans-serif";
    const below = operator ? secondLine(operator) : t("operators-inside", { count: this.within[node.target].length });
    context.fillText(cut(below, node.width * 1.15), middle, node.y + 25);
  }

  /** @param {{left: number, top: number, right: number, bottom: number}} view */
  drawEdges(view) {
    const { context } = this;
    context.lineWidth = Math.max(1, 0.7 / this.zoom);
    context.strokeStyle = this.palette("edge");
    context.beginPath();
    const near = [];
    for (const edge of this.drawing.edges) {
      const ys = edge.points.map((point) => point[1]);
      if (Math.max(...ys) < view.top || Math.min(...ys) > view.bottom) continue;
      if (this.isNear(edge)) near.push(edge);
      else trace(context, edge.points);
    }
    context.stroke();
    context.lineWidth = Math.max(2, 1.4 / this.zoom);
    context.strokeStyle = this.palette("focus");
    context.beginPath();
    for (const edge of near) trace(context, edge.points);
    context.stroke();
  }

  /** Whether an edge belongs to what is pointed at. @param {import("./packing.js").Edge} edge */
  isNear(edge) {
    const ends = [edge.from, edge.to];
    if (this.hovered && ends.includes(this.hovered)) return true;
    return this.focused !== null && ends.some((end) => end && end.kind === this.focused?.kind && end.target === this.focused?.target);
  }

  /** @param {Drawn} node @param {string} ink @param {number} width */
  drawFrame(node, ink, width) {
    const { context } = this;
    context.beginPath();
    context.roundRect(node.x - 3, node.y - 3, node.width + 6, node.height + 6, 11);
    context.lineWidth = width / Math.min(1, this.zoom);
    context.strokeStyle = ink;
    context.stroke();
  }
}

/** @param {CanvasRenderingContext2D} context @param {[number, number][]} points */
function trace(context, points) {
  context.moveTo(...points[0]);
  for (let n = 1; n < points.length; n++) {
    const [ax, ay] = points[n - 1];
    const [bx, by] = points[n];
    const middle = (ay + by) / 2;
    if (ax === bx) context.lineTo(bx, by);
    else context.bezierCurveTo(ax, middle, bx, middle, bx, by);
  }
}

/** @param {Run} run @param {number} box */
function boxesIn(run, box) {
  return run.boxes[box].members.filter(([kind]) => kind === "box").map(([, target]) => target);
}

/** How many members of a box are seen. @param {Run} run @param {number} box */
function visible(run, box) {
  return run.boxes[box].members.filter(([kind]) => kind === "box" || kind === "operator").length;
}

/** @param {Operator[]} operators */
function worstOf(operators) {
  let worst = null;
  for (const operator of operators) {
    const error = relativeError(operator);
    if (error !== null && (!worst || error > /** @type {number} */ (relativeError(worst)))) worst = operator;
  }
  return worst;
}

/** @param {string} text @param {number} width */
function cut(text, width) {
  const letters = Math.floor((width - 10) / 6.2);
  return text.length > letters ? `${text.slice(0, Math.max(1, letters - 1))}…` : text;
}
