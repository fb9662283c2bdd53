/** The table of operators, with search and filters. */

import { choice, h } from "./dom.js";
import { cell, fixed, likeness, percent, show } from "./numbers.js";
import { errorClass, limitOf, relativeError } from "./report.js";
import { go, place } from "./route.js";
import { Table } from "./table.js";
import { t } from "./text.js";

/** @typedef {import("./report.js").Report} Report */
/** @typedef {import("./report.js").Operator} Operator */
/** @typedef {import("./report.js").Row} Row */

/** What the reader asked for; it outlasts a change of language. */
const asked = { text: "", format: "", type: "", only: "" };

/** @param {Report} report @param {string} task */
export function operatorsView(report, task) {
  const limit = limitOf(task);
  const table = new Table(columns(report, limit), report.rows, {
    label: t("operators"), empty: t("nothing-found"), keyOf: (row) => row.key, opened: (row, isStep) => go({ op: row.key, view: "operators" }, isStep),
  });
  const count = h("span", { class: "count", role: "status" });
  const update = () => {
    table.filter((row) => matches(report, row));
    count.textContent = t("shown-of", { shown: table.rows.length, all: report.rows.length });
  };
  const search = h("input", {
    type: "search", id: "search", value: asked.text, placeholder: t("search-hint"), "aria-label": t("search"), autocomplete: "off", spellcheck: "false",
    oninput: () => { asked.text = search.value; update(); },
    onkeydown: (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && table.rows.length) go({ op: table.rows[0].key });
      if (event.key === "ArrowDown") { table.element.focus(); event.preventDefault(); }
    },
  });
  const formats = distinct(report, (operator) => operator.format);
  const types = distinct(report, (operator) => operator.type);
  const bar = h(
    "div", { class: "toolbar" }, search, count,
    choice(t("format"), [["", t("all")], ...formats], asked.format, (value) => { asked.format = value; update(); }, { id: "filter-format" }),
    choice(t("type"), [["", t("all")], ...types], asked.type, (value) => { asked.type = value; update(); }, { id: "filter-type" }),
    choice(t("only"), [["", t("all")], ["beyond", t("only-beyond")], ["advice", t("only-advice")], ["saturated", t("only-saturated")], ["changed", t("only-changed")]].filter(([key]) => key !== "changed" || report.isDiff).map(([a, b]) => [a, b]),
      asked.only, (value) => { asked.only = value; update(); }, { id: "filter-only" }));
  update();
  return {
    element: h("div", { class: "view fixed" }, bar, table.element),
    update: () => table.select(place().op),
    neighbour: (/** @type {number} */ step) => table.neighbour(step),
    focus: () => table.element.focus(),
  };
}

/** @param {Report} report @param {(operator: Operator) => string} get @returns {[string, string][]} */
function distinct(report, get) {
  /** @type {Map<string, number>} */
  const found = new Map();
  for (const row of report.rows) {
    for (const value of new Set(row.operators.filter(Boolean).map((o) => get(/** @type {Operator} */ (o))))) {
      if (value) found.set(value, (found.get(value) ?? 0) + 1);
    }
  }
  return [...found].sort((a, b) => b[1] - a[1]).map(([value, count]) => [value, `${value} (${count})`]);
}

/** @param {Report} report @param {Row} row */
function matches(report, row) {
  const operators = /** @type {Operator[]} */ (row.operators.filter(Boolean));
  const words = asked.text.toLowerCase().split(/\s+/).filter(Boolean);
  const text = operators.map((o) => `${o.key} ${o.path} ${o.type} ${o.format} ${o.line} ${o.reason}`).join(" ").toLowerCase();
  if (!words.every((word) => text.includes(word))) return false;
  if (asked.format && !operators.some((o) => o.format === asked.format)) return false;
  if (asked.type && !operators.some((o) => o.type === asked.type)) return false;
  const withRun = report.runs.map((run) => ({ run, operator: row.operators[run.position] })).filter((item) => item.operator);
  if (asked.only === "beyond") return withRun.some(({ run, operator }) => run.isBeyond(/** @type {Operator} */ (operator)));
  if (asked.only === "saturated") return operators.some((o) => (o.saturation ?? 0) > 0);
  if (asked.only === "advice") {
    return withRun.some(({ run, operator }) => run.document.advice.some((item) => item.operators.includes(/** @type {Operator} */ (operator).index)));
  }
  if (asked.only === "changed") return operators.length < report.runs.length || operators.some((o) => differs(o, operators[0]));
  return true;
}

/** @param {Operator} one @param {Operator} other */
function differs(one, other) {
  return one.format !== other.format || one.scale !== other.scale || one.similarity !== other.similarity || one.sqnr !== other.sqnr;
}

/** @param {Report} report @param {number} limit @returns {import("./table.js").Column<Row>[]} */
function columns(report, limit) {
  /** @type {import("./table.js").Column<Row>[]} */
  const found = [
    { key: "name", label: t("operator"), width: 38, value: (row) => row.key, show: (row) => h("a", { href: `#op=${encodeURIComponent(row.key)}`, class: "name", title: row.key, tabindex: -1 }, row.key) },
    { key: "position", label: "#", hint: t("position"), numeric: true, value: (row) => row.position, show: (row) => show(row.position) },
    { key: "type", label: t("type"), value: (row) => any(row).type },
  ];
  for (const run of report.runs) found.push(...columnsOf(report, run.position, limit));
  if (report.isDiff) {
    const last = report.runs.length - 1;
    found.splice(3, 0, {
      key: "change", label: `Δ ${t("sqnr")}`, hint: t("change-hint", { first: report.runs[0].letter, second: report.runs[last].letter }), numeric: true,
      value: (row) => change(row.operators[0], row.operators[last]), show: (row) => signed(change(row.operators[0], row.operators[last])),
    });
  } else {
    found.push({ key: "line", label: t("line"), value: (row) => any(row).line });
  }
  return found;
}

/** @param {Report} report @param {number} at @param {number} limit @returns {import("./table.js").Column<Row>[]} */
function columnsOf(report, at, limit) {
  const run = report.runs[at];
  const prefix = report.isDiff ? `${run.letter} ` : "";
  /**
   * @param {string} key @param {string} label @param {(o: Operator) => any} get @param {(o: Operator) => any} [draw]
   * @param {Partial<import("./table.js").Column<Row>>} [more]
   * @returns {import("./table.js").Column<Row>}
   */
  const column = (key, label, get, draw, more = {}) => ({
    key: report.isDiff ? `${key}.${at}` : key, label: prefix + label, numeric: true, ...more,
    value: (row) => (row.operators[at] ? get(/** @type {Operator} */ (row.operators[at])) : null),
    show: (row) => {
      const operator = row.operators[at];
      if (!operator) return h("span", { class: "none", title: t("not-in-run") }, "∅");
      return draw ? draw(operator) : cell(get(operator));
    },
  });
  const common = [
    column("format", t("format"), (o) => o.format, (o) => badge(o.format), { numeric: false }),
    column("similarity", run.document.similarity_function || t("similarity"), (o) => o.similarity, (o) => graded(run.isBeyond(o), cell(o.similarity, likeness(o.similarity))), { hint: t("similarity-hint"), first: run.higherIsBetter ? "up" : "down" }),
    column("sqnr", t("sqnr"), (o) => o.sqnr, (o) => cell(o.sqnr, fixed(o.sqnr, 2)), { hint: t("sqnr-hint") }),
    column("relative", t("relative-error"), relativeError, (o) => meter(relativeError(o), limit), { hint: t("relative-error-hint"), first: "down", width: 19 }),
  ];
  if (report.isDiff) return common;
  return [
    ...common,
    column("own", t("own-error"), (o) => o.own, (o) => cell(o.own, percent(o.own)), { hint: t("own-error-hint"), first: "down" }),
    column("same", t("same-input-error"), (o) => o.same_input_error, undefined, { hint: t("same-input-error-hint"), first: "down" }),
    column("error", t("error-steps"), (o) => o.error, undefined, { hint: t("error-steps-hint"), first: "down" }),
    column("atol", t("atol"), (o) => o.atol, undefined, { hint: t("atol-hint"), first: "down" }),
    column("saturation", t("saturation"), (o) => o.saturation, (o) => cell(o.saturation, percent(o.saturation)), { hint: t("saturation-hint"), first: "down" }),
    column("scale", t("scale"), (o) => o.scale, undefined, { first: "down" }),
    column("low", t("low"), (o) => o.first?.low ?? null, undefined, { hint: t("low-hint") }),
    column("high", t("high"), (o) => o.first?.high ?? null, undefined, { hint: t("high-hint"), first: "down" }),
  ];
}

/** @param {Row} row @returns {Operator} */
function any(row) {
  return /** @type {Operator} */ (row.operators.find(Boolean));
}

/** @param {Operator | null} one @param {Operator | null} other */
function change(one, other) {
  if (!one || !other || one.sqnr === null || other.sqnr === null) return null;
  return one.sqnr === other.sqnr ? 0 : other.sqnr - one.sqnr;
}

/** @param {number | null} value */
export function signed(value) {
  if (value === null) return cell(null);
  return h("span", { class: value < 0 ? "worse" : value > 0 ? "better" : "", data: { value: String(value) } }, `${value > 0 ? "+" : ""}${fixed(value, 2)}`);
}

/** @param {boolean} isBad @param {any} content */
function graded(isBad, content) {
  return isBad ? h("span", { class: "beyond" }, content) : content;
}

/** The name of a format, short, in its colour. @param {string} format */
export function badge(format) {
  return format ? h("span", { class: `badge ${formatClass(format)}`, title: format }, shortFormat(format)) : h("span", { class: "none" }, "–");
}

/** @param {string} format */
export function shortFormat(format) {
  return format.replace("torch.", "").replace(/^q(u?int)/, "$1");
}

/** @param {string} format */
export function formatClass(format) {
  const short = shortFormat(format);
  if (/^u?int(4|8|16|32)$/.test(short)) return `f-${short.replace("u", "")}`;
  if (short === "float16" || short === "bfloat16") return "f-float16";
  return short.startsWith("float") ? "f-float32" : "f-other";
}

/** A relative error beside a bar that is full at the limit. @param {number | null} error @param {number} limit */
export function meter(error, limit) {
  if (error === null) return cell(null);
  const share = Number.isNaN(error) ? 1 : Math.min(1, error / limit);
  return h("span", { class: "meter" },
    h("span", { class: "track", "aria-hidden": "true" }, h("span", { class: `bar e${errorClass(error, limit)}`, style: { width: `${(share * 100).toFixed(1)}%` } })),
    cell(error, percent(error)));
}
