/**
 * Coordinates of what is open: rows and places are known, sizes depend on which boxes are open.
 *
 * @typedef {import("./report.js").Run} Run
 * @typedef {{kind: string, target: number, box: number, x: number, y: number, width: number, height: number,
 *            label: string, isOpen: boolean, depth: number}} Drawn
 * @typedef {{points: [number, number][], from: Drawn | null, to: Drawn | null}} Edge
 * @typedef {{nodes: Drawn[], edges: Edge[], width: number, height: number}} Drawing
 */

import { shortFormat } from "./operators.js";

const NODE_HEIGHT = 34;
const LETTER = 6.7;
const SMALL_LETTER = 5.6;
const NARROWEST = 96;
const WIDEST = 260;
const BEND = 12;
const GAP_X = 18;
const GAP_Y = 26;
const PADDING = 14;
const TITLE = 24;
const SWEEPS = 3;

/** @param {string} label @param {string} [below] in small letters */
function widthOf(label, below = "") {
  return Math.max(NARROWEST, Math.min(WIDEST, Math.max(26 + LETTER * label.length, 18 + SMALL_LETTER * below.length)));
}

/** What an operator is called in its box. @param {string} key @param {string} path of the box */
function shortName(key, path) {
  if (path && key.startsWith(`${path}.`)) return key.slice(path.length + 1);
  return path && key.startsWith(`${path}[`) ? key.slice(path.length) : key;
}

/** What stands below its name. @param {import("./report.js").Operator} operator */
export function secondLine(operator) {
  return [operator.type, operator.format && shortFormat(operator.format)].filter(Boolean).join(" · ");
}

/** @param {Run} run @param {Set<number>} open boxes @returns {Drawing} */
export function pack(run, open) {
  /** @type {Drawing} */
  const drawing = { nodes: [], edges: [], width: 0, height: 0 };
  const inner = inside(run, 0, open);
  place(run, inner, 0, 0, 0, drawing);
  drawing.width = inner.width;
  drawing.height = inner.height;
  return drawing;
}

/**
 * @typedef {{box: number, width: number, height: number, x: number[], y: number[], widths: number[], heights: number[],
 *            inner: (Inside | null)[], labels: string[]}} Inside
 */

/** The members of a box, placed in it. @param {Run} run @param {number} at @param {Set<number>} open @returns {Inside} */
function inside(run, at, open) {
  const box = run.boxes[at];
  const count = box.members.length;
  const widths = new Array(count).fill(0);
  const heights = new Array(count).fill(0);
  const labels = new Array(count).fill("");
  /** @type {(Inside | null)[]} */
  const inner = new Array(count).fill(null);
  /** @type {number[][]} */
  const rows = [];
  box.members.forEach(([kind, target, row, order], n) => {
    (rows[row] ??= [])[order] = n;
    let below = "";
    if (kind === "operator") {
      labels[n] = shortName(run.operators[target].key, box.path);
      below = secondLine(run.operators[target]);
    }
    if (kind === "box") labels[n] = run.boxes[target].label;
    if (kind === "box" && open.has(target)) {
      const content = inside(run, target, open);
      inner[n] = content;
      widths[n] = Math.max(content.width, widthOf(labels[n]));
      heights[n] = content.height;
    } else if (kind === "operator" || kind === "box") {
      widths[n] = widthOf(labels[n], below);
      heights[n] = NODE_HEIGHT;
    } else {
      widths[n] = BEND;
    }
  });
  const top = at === 0 ? PADDING : TITLE + 6;
  const y = new Array(count).fill(0);
  let below = top;
  for (const row of rows) {
    const tallest = Math.max(...row.map((n) => heights[n]));
    for (const n of row) {
      // A connection passes straight through the row.
      if (box.members[n][0] === "bend") heights[n] = tallest;
      y[n] = below + (tallest - heights[n]) / 2;
    }
    below += tallest + (tallest ? GAP_Y : 8);
  }
  const x = centres(box, rows, widths);
  const left = Math.min(...x.map((centre, n) => centre - widths[n] / 2), 0) - PADDING;
  const right = Math.max(...x.map((centre, n) => centre + widths[n] / 2), 0) + PADDING;
  const width = Math.max(right - left, at === 0 ? 0 : 22 + LETTER * box.label.length);
  const shift = (width - (right - left)) / 2 - left;
  return { box: at, width, height: Math.max(below - GAP_Y, top) + PADDING, x: x.map((centre) => centre + shift), y, widths, heights, inner, labels };
}

/**
 * Members near the middle of what they are connected to, in their order and without overlap.
 *
 * @param {import("./report.js").Box} box @param {number[][]} rows @param {number[]} widths
 */
function centres(box, rows, widths) {
  const count = box.members.length;
  /** @type {number[][]} */
  const above = Array.from({ length: count }, () => []);
  /** @type {number[][]} */
  const below = Array.from({ length: count }, () => []);
  for (const route of box.routes) {
    for (let n = 1; n < route.length; n++) {
      above[route[n]].push(route[n - 1]);
      below[route[n - 1]].push(route[n]);
    }
  }
  const x = new Array(count).fill(0);
  for (const row of rows) settle(row, row.map(() => 0), widths, x);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const near = sweep % 2 ? below : above;
    const order = sweep % 2 ? [...rows].reverse() : rows;
    for (const row of order) {
      const wished = row.map((n) => (near[n].length ? near[n].reduce((sum, other) => sum + x[other], 0) / near[n].length : x[n]));
      settle(row, wished, widths, x);
    }
  }
  return x;
}

/**
 * The positions next to the wished ones, in order, with room between: neighbours that meet move as one.
 *
 * @param {number[]} row @param {number[]} wished @param {number[]} widths @param {number[]} x
 */
function settle(row, wished, widths, x) {
  /** @type {{sum: number, count: number, start: number}[]} */
  const groups = [];
  const offset = [0];
  for (let n = 1; n < row.length; n++) offset[n] = offset[n - 1] + (widths[row[n - 1]] + widths[row[n]]) / 2 + GAP_X;
  row.forEach((_, n) => {
    groups.push({ sum: wished[n] - offset[n], count: 1, start: n });
    while (groups.length > 1) {
      const [one, other] = groups.slice(-2);
      if (one.sum / one.count <= other.sum / other.count) break;
      groups.splice(-2, 2, { sum: one.sum + other.sum, count: one.count + other.count, start: one.start });
    }
  });
  groups.forEach((group, g) => {
    const end = groups[g + 1]?.start ?? row.length;
    for (let n = group.start; n < end; n++) x[row[n]] = group.sum / group.count + offset[n];
  });
}

/** Into the coordinates of the whole. @param {Run} run @param {Inside} content @param {number} left @param {number} top @param {number} depth @param {Drawing} drawing */
function place(run, content, left, top, depth, drawing) {
  const box = run.boxes[content.box];
  /** @type {(Drawn | null)[]} */
  const drawn = box.members.map(([kind, target], n) => {
    if (kind !== "operator" && kind !== "box") return null;
    const node = {
      kind, target, box: content.box, x: left + content.x[n] - content.widths[n] / 2, y: top + content.y[n],
      width: content.widths[n], height: content.heights[n], label: content.labels[n], isOpen: content.inner[n] !== null, depth,
    };
    drawing.nodes.push(node);
    const inner = content.inner[n];
    if (inner) place(run, inner, node.x + (node.width - inner.width) / 2, node.y, depth + 1, drawing);
    return node;
  });
  for (const route of box.routes) {
    /** @type {[number, number][]} */
    const points = [];
    route.forEach((n, at) => {
      const kind = box.members[n][0];
      const node = drawn[n];
      const inner = content.inner[n];
      // Into an open box, where its own connections begin; out of it, where they end.
      const port = inner && run.boxes[inner.box].members.findIndex((member) => member[0] === (at === 0 ? "out" : "in"));
      const x = node && inner && port !== null && port >= 0 ? node.x + (node.width - inner.width) / 2 + inner.x[port] : left + content.x[n];
      const y = top + content.y[n];
      if (kind === "in") points.push([x, top]);
      else if (kind === "out") points.push([x, top + content.height]);
      else if (kind === "bend") points.push([x, y], [x, y + content.heights[n]]);
      else points.push([x, at === 0 ? y + content.heights[n] : y]);
    });
    drawing.edges.push({ points, from: drawn[route[0]], to: drawn[route[route.length - 1]] });
  }
}
