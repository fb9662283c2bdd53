/** A value for each operator, in the order of the forward. */

import { choice, h, svg } from "./dom.js";
import { likeness, show, ticks } from "./numbers.js";
import { relativeError } from "./report.js";
import { go, place } from "./route.js";
import { t } from "./text.js";

/** @typedef {import("./report.js").Report} Report */
/** @typedef {import("./report.js").Operator} Operator */

const WIDTH = 1000;
const HEIGHT = 240;
const LEFT = 52;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 24;

/** @type {Record<string, (operator: Operator) => number | null>} */
const SERIES = {
  similarity: (operator) => operator.similarity,
  sqnr: (operator) => operator.sqnr,
  "relative-error": (operator) => relativeError(operator),
  "same-input-error": (operator) => operator.same_input_error,
  saturation: (operator) => operator.saturation,
};

/** @param {Report} report */
export function curve(report) {
  let shown = "similarity";
  const holder = h("div", {});
  const readout = h("p", { class: "readout", id: "curve-readout" }, t("curve-help"));
  const draw = () => holder.replaceChildren(drawing(report, shown, readout));
  const names = Object.keys(SERIES).filter((name) => report.rows.some((row) => row.operators.some((o) => o && SERIES[name](o) !== null)));
  if (!names.length) return h("p", { class: "empty" }, t("no-curve"));
  if (!names.includes(shown)) shown = names[0];
  draw();
  const label = report.runs[0].document.similarity_function;
  return h(
    "div", { class: "curve" },
    h("div", { class: "legend" },
      choice(t("curve-of"), names.map((name) => [name, name === "similarity" ? `${t(name)} (${label})` : t(name)]), shown, (name) => { shown = name; draw(); }, { id: "curve-of" }),
      h("span", { class: "spring" }),
      report.isDiff && report.runs.map((run) => h("span", { class: `key run${run.position % 6}` }, run.label))),
    holder, readout);
}

/** @param {Report} report @param {string} name @param {HTMLElement} readout */
function drawing(report, name, readout) {
  const get = SERIES[name];
  const lines = report.runs.map((run) => report.rows.map((row) => {
    const operator = row.operators[run.position];
    return operator ? get(operator) : null;
  }));
  const finite = lines.flat().filter((value) => value !== null && Number.isFinite(value));
  const run = report.runs[0];
  const threshold = name === "similarity" ? run.threshold : null;
  let [low, high] = [Math.min(...(/** @type {number[]} */ (finite))), Math.max(...(/** @type {number[]} */ (finite)))];
  if (!finite.length) [low, high] = [0, 1];
  // The threshold belongs to the picture where the values come near it.
  if (threshold !== null && Math.abs(threshold - (low + high) / 2) < 2 * (high - low) + 0.02) {
    low = Math.min(low, threshold);
    high = Math.max(high, threshold);
  }
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const margin = (high - low) * 0.06;
  if (name === "similarity" && run.document.similarity_function === "Cosine") high = Math.max(high, 1);
  [low, high] = [low - margin, high + margin];
  const count = report.rows.length;
  /** @param {number} at */
  const x = (at) => LEFT + (count > 1 ? at / (count - 1) : 0.5) * (WIDTH - LEFT - RIGHT);
  /** @param {number} value infinities are at the border */
  const y = (value) => TOP + (1 - (Math.min(high, Math.max(low, value)) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "plot", tabindex: 0, role: "slider", "aria-label": `${t("curve")}: ${t(name)}`,
    "aria-valuemin": 0, "aria-valuemax": Math.max(0, count - 1), "aria-valuenow": 0, "aria-valuetext": "", preserveAspectRatio: "none",
  });
  const frame = svg("g", {});
  for (const value of ticks(low, high, 5)) {
    frame.append(
      svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, show(value, 4)));
  }
  for (const value of ticks(0, Math.max(1, count - 1), 10)) {
    if (Number.isInteger(value)) frame.append(svg("text", { class: "tick", x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, show(value)));
  }
  if (threshold !== null && threshold >= low && threshold <= high) {
    frame.append(
      svg("line", { class: "threshold", x1: LEFT, x2: WIDTH - RIGHT, y1: y(threshold), y2: y(threshold) }),
      svg("text", { class: "tick threshold-text", x: LEFT + 4, y: y(threshold) - 5 }, `${t("threshold")} ${show(threshold)}`));
  }
  picture.append(frame);
  lines.forEach((values, at) => {
    picture.append(svg("path", { class: `series run${at % 6}`, d: path(values, x, y) }));
    if (count <= 200) {
      values.forEach((value, n) => {
        if (value === null || Number.isNaN(value)) return;
        const operator = report.rows[n].operators[at];
        const isBad = name === "similarity" && operator && report.runs[at].isBeyond(operator);
        picture.append(svg("circle", { class: `point run${at % 6}${isBad ? " beyond" : ""}`, cx: x(n), cy: y(value), r: isBad ? 4 : 2.4 }));
      });
    }
  });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  picture.append(cursor);
  let current = -1;
  /** @param {number} at */
  const point = (at) => {
    current = Math.max(0, Math.min(count - 1, at));
    const row = report.rows[current];
    cursor.setAttribute("x1", x(current));
    cursor.setAttribute("x2", x(current));
    const values = lines.map((line, n) => (report.isDiff ? `${report.runs[n].letter} ` : "") + likeness(line[current]));
    const text = `${row.key}: ${values.join(", ")}`;
    picture.setAttribute("aria-valuenow", current);
    picture.setAttribute("aria-valuetext", text);
    readout.textContent = text;
  };
  const selected = report.byKey.get(place().op ?? "");
  if (selected) point(selected.position);
  picture.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    point(Math.round(((at - LEFT) / (WIDTH - LEFT - RIGHT)) * (count - 1)));
  });
  picture.addEventListener("click", () => current >= 0 && go({ op: report.rows[current].key, view: "operators" }));
  picture.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const moves = /** @type {Record<string, number>} */ ({ ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -count, End: count });
    if (event.key in moves) point(current < 0 ? 0 : current + moves[event.key]);
    else if (event.key === "Enter" && current >= 0) go({ op: report.rows[current].key, view: "operators" });
    else return;
    event.preventDefault();
  });
  return picture;
}

/** @param {(number | null)[]} values @param {(at: number) => number} x @param {(value: number) => number} y */
function path(values, x, y) {
  let drawn = "";
  let isDown = false;
  values.forEach((value, at) => {
    if (value === null || Number.isNaN(value)) {
      isDown = false;
    } else {
      drawn += `${isDown ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      isDown = true;
    }
  });
  return drawn;
}
