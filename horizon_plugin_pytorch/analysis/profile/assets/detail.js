/** Everything about one operator; of several runs, side by side. */

import { h, icon, sign, prose } from "./dom.js";
import { histogram, rangeOf } from "./histogram.js";
import { cell, fixed, likeness, percent, show } from "./numbers.js";
import { badge, meter } from "./operators.js";
import { adviceCard } from "./overview.js";
import { limitOf, relativeError, remarksOn } from "./report.js";
import { go, link, place } from "./route.js";
import { t } from "./text.js";

/** @typedef {import("./report.js").Report} Report */
/** @typedef {import("./report.js").Run} Run */
/** @typedef {import("./report.js").Operator} Operator */
/** @typedef {import("./report.js").Values} Values */
/** @typedef {{operator: Operator, run: Run, names: [string, string], remarks: ReturnType<typeof remarksOn>}} Shown */

/**
 * @param {Report} report @param {string} key @param {string} task
 * @param {(step: number) => void} step to the operator before or after
 */
export function detail(report, key, task, step) {
  const row = report.byKey.get(key);
  const button = (/** @type {string} */ id, /** @type {string} */ kind, /** @type {string} */ label, /** @type {string} */ keys, /** @type {(e: Event) => void} */ act) =>
    h("button", { type: "button", class: "quiet", id, onclick: act, title: keys ? `${label} (${keys})` : label, "aria-label": label }, sign(kind));
  const close = button("close-detail", "cross", t("close"), "Esc", () => go({ op: null, view: place().view }));
  if (!row) {
    return h("div", {}, h("header", {}, h("h2", { class: "grow" }, t("no-such-operator")), close), h("p", { class: "empty" }, t("no-such-operator-text", { name: key })));
  }
  const any = /** @type {Operator} */ (row.operators.find(Boolean));
  const runs = report.runs.filter((run) => row.operators[run.position]);
  const shown = runs.map((run) => {
    const operator = /** @type {Operator} */ (row.operators[run.position]);
    return { run, operator, names: /** @type {[string, string]} */ ([run.document.first, run.document.second]), remarks: remarksOn(run, operator) };
  });
  const columns = report.isDiff ? { gridTemplateColumns: `repeat(${runs.length}, minmax(290px, 1fr))` } : {};
  const range = report.isDiff ? rangeOf(shown.map((item) => item.operator)) : null;
  return h(
    "div", {},
    h("header", {},
      h("div", { class: "grow" },
        h("h2", { class: "name", id: "detail-name" }, row.key),
        h("p", { class: "quiet" }, [any.type, any.line, any.shape.length ? any.shape.join(" × ") : ""].filter(Boolean).join("  ·  "))),
      button("previous", "up", t("previous"), "[", () => step(-1)),
      button("next", "down", t("next"), "]", () => step(1)),
      button("copy-link", "link", t("copy-link"), "", copyLink),
      close),
    !any.name.startsWith(any.path) && h("p", { class: "quiet" }, `${t("module")}: `, h("code", {}, any.path)),
    h("div", { class: "jump" }, h("a", { href: link({ view: "operators", op: key }) }, t("in-table")), h("a", { href: link({ view: "graph", op: key }) }, t("in-graph"))),
    report.isDiff && report.runs.length > runs.length && h("p", { class: "note" }, t("only-in-runs", { runs: runs.map((run) => run.label).join(", ") })),
    h("div", { class: report.isDiff ? "runs side-by-side" : "runs", style: columns },
      shown.map((item) => h("section", { class: "run", "aria-label": item.run.label, data: { run: item.run.position } },
        // The same parts in each column, so that they stand on one line.
        h("div", {}, report.isDiff && h("h3", { class: `run-title run${item.run.position % 6}` }, item.run.label), numbers(item, limitOf(task))),
        !report.isDiff && h("div", {}, remarks(item)),
        h("div", {}, h("h3", {}, t("values")), histogram(item.operator, item.names, range), statistics(item.operator.first, item.operator.second, item.names)),
        // What only one of them is told would push the other's histogram away.
        report.isDiff && h("div", {}, remarks(item)),
        h("div", {}, item.remarks.weights.map((weight) => ofWeight(item, weight)).flat()),
        h("div", {}, h("h3", {}, t("connections")), connections(item.run, t("inputs"), item.operator.inputs), connections(item.run, t("consumers"), item.run.consumers[item.operator.index]))))));
}

/** @param {Event} event */
async function copyLink(event) {
  const button = /** @type {HTMLElement} */ (event.currentTarget);
  try {
    await navigator.clipboard.writeText(location.href);
    button.replaceChildren(sign("tick"));
  } catch {
    prompt(t("copy-link"), location.href);
  }
}

/** @param {Shown} shown @param {number} limit */
function numbers({ run, operator, remarks }, limit) {
  const error = relativeError(operator);
  return facts([
    ["format", t("format"), h("span", {}, badge(operator.format), operator.reason && h("span", { class: "quiet" }, ` ${operator.reason}`))],
    ["input_formats", t("input-formats"), operator.input_formats.length ? h("span", {}, operator.input_formats.map((format) => [badge(format), " "]).flat()) : null],
    ["similarity", run.document.similarity_function || t("similarity"), h("span", { class: run.isBeyond(operator) ? "beyond" : null }, cell(operator.similarity, likeness(operator.similarity)))],
    ["sqnr", t("sqnr"), operator.sqnr === null ? null : h("span", {}, cell(operator.sqnr, fixed(operator.sqnr, 2)), " dB")],
    ["relative", t("relative-error"), error === null ? null : meter(error, limit)],
    ["own", t("own-error"), operator.own === null ? null : cell(operator.own, percent(operator.own))],
    ["same_input_error", t("same-input-error"), operator.same_input_error === null ? null : h("span", {}, cell(operator.same_input_error), ` ${t("steps")}`)],
    ["atol", t("largest-difference"), operator.atol === null ? null : h("span", {}, cell(operator.atol), operator.error === null ? "" : [" = ", cell(operator.error), ` ${t("steps")}`])],
    ["saturation", t("saturation"), operator.saturation === null ? null : cell(operator.saturation, percent(operator.saturation))],
    ["at_end", t("at-end"), operator.at_end === null || operator.at_end === undefined ? null : cell(operator.at_end, percent(operator.at_end))],
    ["scale", t("scale"), scaleOf(operator)],
    ["grid", t("grid"), operator.grid && h("span", {}, cell(operator.grid[0]), " … ", cell(operator.grid[1]))],
    ["called", t("called"), remarks.called && t("times", { count: remarks.called.count })],
  ]);
}

/** @param {Shown} shown */
function remarks({ run, remarks: { advice, messages, unfused } }) {
  return [
    ...advice.map((item) => adviceCard(run, item, false)),
    ...messages.map((item) => h("div", { class: "card warning" }, icon("watch"), h("div", {}, h("p", {}, prose(item.text)), item.remedy && h("p", { class: "quiet" }, prose(item.remedy))))),
    ...unfused.map((pattern) => h("div", { class: "card hint" }, icon("hint"), h("p", {}, `${t("could-be-fused")}: `, h("code", {}, pattern.join(" + "))))),
  ];
}

/** @param {Shown} shown @param {import("./report.js").Weight} weight */
function ofWeight({ run, names }, weight) {
  return [
    h("h3", { class: "name" }, weight.name),
    facts([
      ["weight-format", t("format"), badge(weight.format)],
      ["weight-similarity", run.document.similarity_function || t("similarity"), cell(weight.similarity, likeness(weight.similarity))],
      ["weight-atol", t("largest-difference"), cell(weight.atol)],
      ["weight-scale", t("scale"), scaleOf(weight)],
    ]),
    histogram(weight, names),
    statistics(weight.first, weight.second, names),
  ];
}

/** @param {{scale: number | null, scale_low: number | null}} item */
export function scaleOf(item) {
  if (item.scale === null) return null;
  if (item.scale_low === null || item.scale_low === item.scale) return cell(item.scale);
  return h("span", {}, cell(item.scale_low), " … ", cell(item.scale), h("span", { class: "quiet" }, ` ${t("by-channel")}`));
}

/** @param {[string, string, any][]} items keys, names, values; what has no value is left out */
function facts(items) {
  const known = items.filter(([, , value]) => value !== null);
  return h("dl", { class: "facts" }, known.map(([key, name, value]) => [h("dt", {}, name), h("dd", { data: { fact: key } }, value)]).flat());
}

/** @param {Values | null} first @param {Values | null} second @param {[string, string]} names */
function statistics(first, second, names) {
  const shown = [first, second].map((values, at) => ({ values, name: names[at] })).filter((item) => item.values);
  if (!shown.length) return null;
  /** @type {[string, (v: Values) => any][]} */
  const rows = [
    [t("low"), (v) => cell(v.low)], [t("high"), (v) => cell(v.high)], [t("mean"), (v) => cell(v.mean)], [t("variance"), (v) => cell(v.var)],
  ];
  if (shown.some(({ values }) => values?.nan)) rows.push(["NaN", (v) => cell(v.nan)]);
  if (shown.some(({ values }) => values?.inf)) rows.push(["±∞", (v) => cell(v.inf)]);
  if (shown.some(({ values }) => values?.dead)) rows.push([t("dead-channels"), (v) => (v.channels ? t("of-channels", { count: v.dead ?? 0, all: v.channels }) : "–")]);
  const batches = shown.map(({ values }) => spread(values?.ranges ?? []));
  if (batches.some(Boolean)) rows.push([t("between-batches"), (v) => spread(v.ranges ?? []) ?? "–"]);
  return h("table", { class: "small" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("statistic")), shown.map(({ name }) => h("th", { scope: "col", class: "numeric" }, name)))),
    h("tbody", {}, rows.map(([name, draw]) => h("tr", {}, h("th", { scope: "row" }, name), shown.map(({ values }) => h("td", { class: "numeric" }, draw(/** @type {Values} */ (values))))))));
}

/** The largest magnitude of the batch with the smallest one, and of that with the largest. @param {[number, number][]} ranges */
function spread(ranges) {
  if (ranges.length < 2) return null;
  const sizes = ranges.map(([low, high]) => Math.max(Math.abs(low), Math.abs(high)));
  return `${show(Math.min(...sizes), 4)} … ${show(Math.max(...sizes), 4)}`;
}

/** @param {Run} run @param {string} title @param {number[]} indices */
function connections(run, title, indices) {
  const found = indices.map((index) => run.operators[index]).filter(Boolean);
  return h("div", { class: "connections" }, h("h4", {}, title),
    found.length
      ? h("ul", {}, found.map((operator) => h("li", {}, h("a", { class: "name", href: link({ op: operator.key }) }, operator.key), " ", badge(operator.format), h("span", { class: "quiet" }, ` ${likeness(operator.similarity)}`))))
      : h("p", { class: "empty" }, t("none")));
}
