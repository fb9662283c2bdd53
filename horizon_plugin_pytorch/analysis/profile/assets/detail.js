/** Everything about one operator; of several runs, side by side. */

import { h, icon } from "./dom.js";
import { histogram } from "./histogram.js";
import { cell, percent, show } from "./numbers.js";
import { badge, meter } from "./operators.js";
import { limitOf, relativeError, remarksOn } from "./report.js";
import { go, link } from "./route.js";
import { adviceCard } from "./overview.js";
import { t } from "./text.js";

/** @typedef {import("./report.js").Report} Report */
/** @typedef {import("./report.js").Run} Run */
/** @typedef {import("./report.js").Operator} Operator */
/** @typedef {import("./report.js").Values} Values */

/**
 * @param {Report} report @param {string} key @param {string} task
 * @param {(step: number) => void} step to the operator before or after
 */
export function detail(report, key, task, step) {
  const row = report.byKey.get(key);
  const close = h("button", { type: "button", class: "quiet", id: "close-detail", onclick: () => go({ op: null }), title: `${t("close")} (Esc)`, "aria-label": t("close") }, "✕");
  if (!row) {
    return h("div", {}, h("header", {}, h("h2", {}, t("no-such-operator")), close), h("p", { class: "empty" }, t("no-such-operator-text", { name: key })));
  }
  const any = /** @type {Operator} */ (row.operators.find(Boolean));
  const runs = report.runs.filter((run) => row.operators[run.position]);
  return h(
    "div", {},
    h("header", {},
      h("div", { class: "grow" },
        h("h2", { class: "name", id: "detail-name" }, row.key),
        h("p", { class: "quiet" }, [any.type, any.line, any.shape.length ? any.shape.join(" × ") : ""].filter(Boolean).join("  ·  "))),
      h("button", { type: "button", class: "quiet", onclick: () => step(-1), title: `${t("previous")} ([)`, "aria-label": t("previous") }, "↑"),
      h("button", { type: "button", class: "quiet", onclick: () => step(1), title: `${t("next")} (])`, "aria-label": t("next") }, "↓"),
      h("button", { type: "button", class: "quiet", onclick: (/** @type {Event} */ e) => copyLink(e), title: t("copy-link"), "aria-label": t("copy-link") }, "🔗︎"),
      close),
    h("div", { class: "jump" }, h("a", { href: link({ view: "operators", op: key }) }, t("in-table")), h("a", { href: link({ view: "graph", op: key }) }, t("in-graph"))),
    report.isDiff && report.runs.length > runs.length && h("p", { class: "note" }, t("only-in-runs", { runs: runs.map((run) => run.label).join(", ") })),
    h("div", { class: report.isDiff ? "runs side" : "runs" },
      runs.map((run) => ofRun(report, run, /** @type {Operator} */ (row.operators[run.position]), limitOf(task)))));
}

/** @param {Event} event */
async function copyLink(event) {
  const button = /** @type {HTMLElement} */ (event.currentTarget);
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "✓";
  } catch {
    prompt(t("copy-link"), location.href);
  }
}

/** @param {Report} report @param {Run} run @param {Operator} operator @param {number} limit */
function ofRun(report, run, operator, limit) {
  const { document } = run;
  const remarks = remarksOn(run, operator);
  /** @type {[string, string]} */
  const names = [document.first, document.second];
  return h(
    "section", { class: "run", "aria-label": run.label, data: { run: run.position } },
    report.isDiff && h("h3", { class: `run-title run${run.position % 6}` }, run.label),
    facts([
      [t("format"), h("span", {}, badge(operator.format), operator.reason && h("span", { class: "quiet", data: { fact: "reason" } }, ` ${operator.reason}`)), "format"],
      [t("input-formats"), operator.input_formats.length ? h("span", {}, operator.input_formats.map((format) => [badge(format), " "]).flat()) : null, "input_formats"],
      [run.document.similarity_function || t("similarity"), h("span", { class: run.isBeyond(operator) ? "beyond" : null }, cell(operator.similarity, show(operator.similarity, 6))), "similarity"],
      [t("sqnr"), operator.sqnr === null ? null : h("span", {}, cell(operator.sqnr, show(operator.sqnr, 4)), " dB"), "sqnr"],
      [t("relative-error"), relativeError(operator) === null ? null : meter(relativeError(operator), limit), "relative"],
      [t("own-error"), operator.own === null ? null : cell(operator.own, percent(operator.own)), "own"],
      [t("same-input-error"), operator.same_input_error === null ? null : h("span", {}, cell(operator.same_input_error), ` ${t("steps")}`), "same_input_error"],
      [t("largest-difference"), operator.atol === null ? null : h("span", {}, cell(operator.atol), operator.error === null ? "" : [" = ", cell(operator.error), ` ${t("steps")}`]), "atol"],
      [t("saturation"), operator.saturation === null ? null : cell(operator.saturation, percent(operator.saturation)), "saturation"],
      [t("scale"), scaleOf(operator), "scale"],
      [t("grid"), operator.grid && h("span", {}, cell(operator.grid[0]), " … ", cell(operator.grid[1])), "grid"],
      [t("called"), remarks.called && t("times", { count: remarks.called.count }), "called"],
    ]),
    remarks.advice.map((item) => adviceCard(run, item)),
    remarks.messages.map((item) => h("div", { class: "card warning" }, icon("watch"), h("div", {}, h("p", {}, item.text), item.remedy && h("p", { class: "quiet" }, item.remedy)))),
    remarks.unfused.map((pattern) => h("div", { class: "card hint" }, icon("hint"), h("p", {}, `${t("could-be-fused")}: `, h("code", {}, pattern.join(" + "))))),
    h("h3", {}, t("values")),
    histogram(operator, names),
    statistics(operator.first, operator.second, names),
    remarks.weights.map((weight) => [
      h("h3", {}, h("code", {}, weight.name)),
      facts([
        [t("format"), badge(weight.format), "weight-format"],
        [run.document.similarity_function || t("similarity"), cell(weight.similarity, show(weight.similarity, 6)), "weight-similarity"],
        [t("largest-difference"), cell(weight.atol), "weight-atol"],
        [t("scale"), scaleOf(weight), "weight-scale"],
      ]),
      histogram(weight, names),
      statistics(weight.first, weight.second, names),
    ]).flat(),
    h("h3", {}, t("connections")),
    connections(run, t("inputs"), operator.inputs),
    connections(run, t("consumers"), run.consumers[operator.index]));
}

/** @param {{scale: number | null, scale_low: number | null}} item */
export function scaleOf(item) {
  if (item.scale === null) return null;
  if (item.scale_low === null || item.scale_low === item.scale) return cell(item.scale);
  return h("span", {}, cell(item.scale_low), " … ", cell(item.scale), h("span", { class: "quiet" }, ` ${t("by-channel")}`));
}

/** @param {[string, any, string][]} items what has no value is left out */
function facts(items) {
  return h("dl", { class: "facts" }, items.filter(([, value]) => value !== null).map(([name, value, key]) => [h("dt", {}, name), h("dd", { data: { fact: key } }, value)]).flat());
}

/** @param {Values | null} first @param {Values | null} second @param {[string, string]} names */
function statistics(first, second, names) {
  const shown = [first, second].map((values, at) => ({ values, name: names[at] })).filter((item) => item.values);
  if (!shown.length) return null;
  /** @type {[string, (v: Values) => number | null][]} */
  const rows = [[t("low"), (v) => v.low], [t("high"), (v) => v.high], [t("mean"), (v) => v.mean], [t("variance"), (v) => v.var]];
  if (shown.some(({ values }) => values?.nan)) rows.push(["NaN", (v) => v.nan]);
  if (shown.some(({ values }) => values?.inf)) rows.push(["∞", (v) => v.inf]);
  return h("table", { class: "small" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("statistic")), shown.map(({ name }) => h("th", { scope: "col", class: "numeric" }, name)))),
    h("tbody", {}, rows.map(([name, get]) => h("tr", {}, h("th", { scope: "row" }, name), shown.map(({ values }) => h("td", { class: "numeric" }, cell(get(/** @type {Values} */ (values)))))))));
}

/** @param {Run} run @param {string} title @param {number[]} indices */
function connections(run, title, indices) {
  const found = indices.map((index) => run.operators[index]).filter(Boolean);
  return h("div", { class: "connections" }, h("h4", {}, title),
    found.length
      ? h("ul", {}, found.map((operator) => h("li", {}, h("a", { class: "name", href: link({ op: operator.key }) }, operator.key), " ", badge(operator.format), h("span", { class: "quiet" }, ` ${show(operator.similarity, 6)}`))))
      : h("p", { class: "empty" }, t("none")));
}
