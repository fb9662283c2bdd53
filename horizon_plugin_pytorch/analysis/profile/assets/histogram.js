/** Histograms of two tensors with the quantization grid behind them. */

import { h, svg } from "./dom.js";
import { show, ticks } from "./numbers.js";
import { t } from "./text.js";

/** @typedef {import("./report.js").Values} Values */
/** @typedef {import("./report.js").Histogram} Histogram */

const WIDTH = 440;
const HEIGHT = 190;
const LEFT = 6;
const RIGHT = 6;
const TOP = 8;
const BOTTOM = 34;
/** The largest bin may be so many times one of the largest tenth before counts are drawn as logarithms. */
const MOST_FOR_LINEAR = 5;

/**
 * @param {{first: Values | null, second: Values | null, grid?: [number, number] | null, scale?: number | null}} shown
 * @param {[string, string]} names of the two
 * @param {[number, number] | null} [common] range of several histograms that are compared
 */
export function histogram({ first, second, grid = null, scale = null }, names, common = null) {
  const series = [trimmed(first), trimmed(second)];
  if (!series.some(Boolean)) return h("p", { class: "empty" }, t("no-histogram"));
  const canvas = h("div", {});
  let isLog = series.some((item) => item !== null && hasPeak(item));
  let isNear = false;
  const values = span(series.map((item) => item && [item.low, item.high]));
  const whole = common ?? span([values, grid]);
  const readout = h("p", { class: "readout" });
  const draw = () => canvas.replaceChildren(drawing(series, grid, scale, isNear ? values : whole, isLog, names, readout));
  const near = (values[1] - values[0]) * 2 < whole[1] - whole[0];
  draw();
  return h(
    "figure", { class: "histogram" },
    h("div", { class: "legend" },
      series[0] && h("span", { class: "key first" }, names[0]),
      series[1] && h("span", { class: "key second" }, names[1]),
      grid && h("span", { class: "key grid" }, t("grid")),
      h("span", { class: "spring" }),
      near && toggle(t("near-values"), false, (on) => { isNear = on; draw(); }),
      toggle(t("log-counts"), isLog, (on) => { isLog = on; draw(); })),
    canvas, readout);
}

/**
 * The range that shows all of several, with their grids.
 *
 * @param {{first: Values | null, second: Values | null, grid?: [number, number] | null}[]} items
 * @returns {[number, number] | null}
 */
export function rangeOf(items) {
  const ranges = items.flatMap(({ first, second, grid }) => [trimmed(first), trimmed(second)].map((item) => item && [item.low, item.high]).concat([grid ?? null]));
  return ranges.some(Boolean) ? span(ranges.map((range) => range ?? null)) : null;
}

/** The bins from the first that holds a value to the last. @param {Values | null} values @returns {Histogram | null} */
function trimmed(values) {
  const item = values?.histogram;
  if (!item || !item.counts.some((count) => count > 0)) return null;
  const width = (item.high - item.low) / item.counts.length;
  const start = item.counts.findIndex((count) => count > 0);
  const end = item.counts.findLastIndex((count) => count > 0) + 1;
  return { low: item.low + start * width, high: item.low + end * width, counts: item.counts.slice(start, end) };
}

/** Whether few bins dwarf the others, as zero does behind a ReLU, and the ends where values are cut off. @param {Histogram} item */
function hasPeak(item) {
  const counts = item.counts.filter((count) => count > 0).sort((a, b) => a - b);
  return counts.length > 2 && counts[counts.length - 1] > MOST_FOR_LINEAR * counts[Math.floor(counts.length * 0.9)];
}

/** @param {string} text @param {boolean} isOn @param {(on: boolean) => void} changed */
function toggle(text, isOn, changed) {
  const box = h("input", { type: "checkbox", checked: isOn, onchange: () => changed(box.checked) });
  return h("label", { class: "toggle" }, box, text);
}

/** The range that covers all. @param {([number, number] | number[] | null)[]} ranges @returns {[number, number]} */
function span(ranges) {
  const found = ranges.filter((range) => range && range.every(Number.isFinite));
  const low = Math.min(...found.map((range) => /** @type {number[]} */ (range)[0]));
  const high = Math.max(...found.map((range) => /** @type {number[]} */ (range)[1]));
  return low < high ? [low, high] : [low - 0.5, high + 0.5];
}

/**
 * @param {(Histogram | null)[]} series @param {[number, number] | null} grid @param {number | null} scale
 * @param {[number, number]} range @param {boolean} isLog @param {[string, string]} names @param {HTMLElement} readout
 */
function drawing(series, grid, scale, range, isLog, names, readout) {
  const [low, high] = range;
  const floor = HEIGHT - BOTTOM;
  /** @param {number} value */
  const x = (value) => LEFT + ((value - low) / (high - low)) * (WIDTH - LEFT - RIGHT);
  const densities = series.map((item) => item && density(item));
  const all = densities.flatMap((d) => d ?? []).filter((d) => d > 0);
  const top = all.length ? Math.max(...all) : 1;
  // Seven decades below the largest: a single value among ten million is seen.
  const bottom = Math.max(Math.min(...all, top), top / 1e7) / 2;
  /** @param {number} d */
  const y = (d) => {
    if (d <= 0) return floor;
    const share = isLog ? Math.max(0, Math.log(d / bottom) / Math.log(top / bottom || Math.E)) : d / top;
    return floor - share * (floor - TOP);
  };
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plot", role: "img", "aria-label": summary(series, grid, names) });
  if (grid) picture.append(...gridMarks(grid, scale, range, x, floor));
  series.forEach((item, at) => {
    const heights = densities[at];
    if (item && heights) picture.append(svg("path", { class: at ? "line second" : "area first", d: outline(item, heights, x, y, floor, at === 0) }));
  });
  picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: floor, y2: floor }));
  for (const value of ticks(low, high, 6)) {
    const at = x(value);
    picture.append(
      svg("line", { class: "axis", x1: at, x2: at, y1: floor, y2: floor + 4 }),
      svg("text", { class: "tick", x: Math.min(WIDTH - 14, Math.max(14, at)), y: HEIGHT - 6, "text-anchor": "middle" }, show(value, 4)));
  }
  const hint = grid && scale && scale > 0 ? t("tick-steps", { count: stepsOfMark(scale, range) }) : "";
  readout.textContent = hint;
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: floor, x1: -9, x2: -9 });
  picture.append(cursor);
  picture.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const value = low + ((at - LEFT) / (WIDTH - LEFT - RIGHT)) * (high - low);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    const counts = series.map((item, n) => (item ? `${names[n]} ${show(countAt(item, value))}` : null)).filter(Boolean);
    readout.textContent = `${show(value, 4)}: ${counts.join(", ")}`;
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    readout.textContent = hint;
  });
  return picture;
}

/** Bins of the two may differ in width, and the tensors in size: shares for each unit are compared. @param {Histogram} item */
function density(item) {
  const total = item.counts.reduce((sum, count) => sum + count, 0) || 1;
  const width = (item.high - item.low) / item.counts.length || 1;
  return item.counts.map((count) => count / total / width);
}

/** @param {Histogram} item @param {number} value */
function countAt(item, value) {
  const at = Math.floor(((value - item.low) / (item.high - item.low)) * item.counts.length);
  return value === item.high ? item.counts[item.counts.length - 1] : (item.counts[at] ?? 0);
}

/**
 * @param {Histogram} item @param {number[]} heights @param {(v: number) => number} x @param {(v: number) => number} y
 * @param {number} floor @param {boolean} closed
 */
function outline(item, heights, x, y, floor, closed) {
  const width = (item.high - item.low) / heights.length || 1;
  const steps = heights.map((d, at) => {
    const left = x(item.low + at * width).toFixed(1);
    const right = x(item.low + (at + 1) * width).toFixed(1);
    return `L${left} ${y(d).toFixed(1)}L${right} ${y(d).toFixed(1)}`;
  });
  const start = x(item.low).toFixed(1);
  const end = x(item.low + heights.length * width).toFixed(1);
  return `M${start} ${floor}${steps.join("")}L${end} ${floor}${closed ? "Z" : ""}`;
}

/** How many steps of the scale lie between two marks: 1, 2, 4, ..., so that marks can be told apart. @param {number} scale @param {[number, number]} range */
function stepsOfMark(scale, [low, high]) {
  const pitch = (scale / (high - low)) * (WIDTH - LEFT - RIGHT);
  return 2 ** Math.max(0, Math.ceil(Math.log2(4 / pitch)));
}

/**
 * What is on the grid, its ends, and its steps: every one where there is room, else every 2nd, 4th, ...
 *
 * @param {[number, number]} grid @param {number | null} scale @param {[number, number]} range
 * @param {(v: number) => number} x @param {number} floor
 */
function gridMarks(grid, scale, range, x, floor) {
  const from = Math.max(LEFT, x(grid[0]));
  const to = Math.min(WIDTH - RIGHT, x(grid[1]));
  const marks = [svg("rect", { class: "grid-area", x: from, y: TOP, width: Math.max(0, to - from), height: floor - TOP })];
  if (scale && scale > 0) {
    const step = scale * stepsOfMark(scale, range);
    const lines = [];
    const start = Math.max(grid[0], range[0]);
    const end = Math.min(grid[1], range[1]);
    for (let at = Math.ceil(start / step - 1e-6); at * step <= end * (1 + 1e-9) + 1e-12 * step && lines.length < 400; at++) {
      lines.push(`M${x(at * step).toFixed(1)} ${floor}v-7`);
    }
    marks.push(svg("path", { class: "grid-steps", d: lines.join("") }));
  }
  for (const end of grid) {
    if (end >= range[0] && end <= range[1]) marks.push(svg("line", { class: "grid-end", x1: x(end), x2: x(end), y1: TOP, y2: floor }));
  }
  return marks;
}

/** In words, for those who do not see it. @param {(Histogram | null)[]} series @param {[number, number] | null} grid @param {[string, string]} names */
function summary(series, grid, names) {
  const parts = series.map((item, at) => item && `${names[at]}: ${show(item.low)} … ${show(item.high)}`).filter(Boolean);
  if (grid) parts.push(`${t("grid")}: ${show(grid[0])} … ${show(grid[1])}`);
  return `${t("histogram")}. ${parts.join(". ")}`;
}
