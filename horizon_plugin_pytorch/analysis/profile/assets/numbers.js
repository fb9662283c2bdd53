/** Numbers as people read them. */

import { h } from "./dom.js";

const SPECIAL = { nan: NaN, inf: Infinity, "-inf": -Infinity };

/** A number from the data, where NaN and infinities are words. @param {any} value @returns {number | null} */
export function number(value) {
  if (typeof value === "string") return /** @type {Record<string, number>} */ (SPECIAL)[value] ?? null;
  return value ?? null;
}

/** @param {number | null | undefined} value @param {number} [digits] that count */
export function show(value, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) && size < 1e15) text = value.toLocaleString("en");
  else if (size >= 1e7 || size < 1e-4) text = value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e");
  else text = value.toPrecision(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return text.replace(/^-/, "−").replace("e-", "e−");
}

/** With so many places behind the point, so that columns line up. @param {number | null | undefined} value @param {number} places */
export function fixed(value, places) {
  if (value === null || value === undefined || !Number.isFinite(value) || Math.abs(value) >= 1e7) return show(value);
  return value.toFixed(places).replace(/^-(?=[0.]*$)/, "").replace(/^-/, "−");
}

/** A share as percent. @param {number | null | undefined} value */
export function percent(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return show(value);
  const scaled = Math.abs(value * 100);
  if (scaled === 0) return "0 %";
  if (scaled < 0.01) return "< 0.01 %";
  return `${fixed(value * 100, scaled < 10 ? 2 : scaled < 100 ? 1 : 0)} %`;
}

/** A share that somebody chose: 10 %, 0.1 %. @param {number} value */
export function round(value) {
  return `${show(value * 100, 3)} %`;
}

/** A similarity. @param {number | null | undefined} value */
export function likeness(value) {
  return value !== null && value !== undefined && Math.abs(value) < 10 ? fixed(value, 6) : show(value, 6);
}

/** A number in the page, with all its digits when it is pointed at. @param {number | null | undefined} value @param {string} [text] */
export function cell(value, text = show(value)) {
  if (value === null || value === undefined) return h("span", { class: "none" }, "–");
  return h("span", { class: "number", title: String(value), data: { value: String(value) } }, text);
}

/** Round numbers between two ends, for an axis. @param {number} low @param {number} high @param {number} count */
export function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}
