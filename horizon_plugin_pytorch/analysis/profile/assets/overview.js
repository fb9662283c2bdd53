/** The verdict first, then what to do, then where the error grows. */

import { curve } from "./curve.js";
import { choice, h, icon, prose } from "./dom.js";
import { cell, fixed, percent, round, show } from "./numbers.js";
import { badge, formatClass, meter, shortFormat, signed } from "./operators.js";
import { judge, limitOf, relativeError } from "./report.js";
import { link } from "./route.js";
import { language, t, tOr } from "./text.js";

/** @typedef {import("./report.js").Report} Report */
/** @typedef {import("./report.js").Run} Run */
/** @typedef {import("./report.js").Advice} Advice */

/** @type {Record<string, string>} */
const ICONS = { error: "bad", warning: "watch", hint: "hint" };
const MOST_LOSING = 8;

/** @param {Report} report @param {string} task @param {(task: string) => void} setTask */
export function overviewView(report, task, setTask) {
  const limit = limitOf(task);
  const tasks = Object.keys(KNOWN.tasks).map((name) => /** @type {[string, string]} */ ([name, `${taskName(name)} (${round(KNOWN.tasks[name])})`]));
  const element = h(
    "div", { class: "view scroll" },
    h("div", { class: "column" },
      report.isDiff && !report.hasSameInputs && h("p", { class: "note", id: "other-inputs" }, t("other-inputs")),
      h("div", { class: report.isDiff ? "verdicts side" : "verdicts" }, report.runs.map((run) => verdict(report, run, task, limit))),
      h("div", { class: "task" }, choice(t("task"), tasks, task, setTask, { id: "task" }), h("span", { class: "quiet" }, t("task-hint"))),
      report.isDiff && changes(report),
      h("h2", {}, t("advice")),
      report.runs.map((run) => advice(report, run)),
      h("h2", {}, t("curve")),
      h("div", { class: "card block" }, curve(report)),
      h("h2", {}, t("where-lost")),
      h("p", { class: "quiet" }, t("where-lost-hint")),
      report.runs.map((run) => losing(report, run, limit)),
      h("h2", {}, t("formats")),
      report.runs.map((run) => formats(report, run)),
      h("h2", {}, t("about")),
      h("div", { class: report.isDiff ? "side" : "" }, report.runs.map((run) => about(report, run)))));
  return { element, update: () => {}, focus: () => {} };
}

/** @param {string} name */
function taskName(name) {
  return tOr(`task-${name}`, name);
}

/** @param {Report} report @param {Run} run @param {string} task @param {number} limit */
function verdict(report, run, task, limit) {
  const found = judge(run, limit);
  const { metric } = run.document;
  const lines = [];
  if (found.worst) {
    const error = relativeError(found.worst);
    lines.push(h("p", {}, `${t("worst-output")}: `, operatorLink(found.worst.key), `, ${t("relative-error")} `, cell(error, percent(error)), ` (${t("limit")} ${round(limit)}, ${taskName(task)})`));
  }
  if (found.compared.length && run.threshold !== null) {
    lines.push(h("p", {}, t("beyond-count", { function: run.document.similarity_function, threshold: show(run.threshold), count: found.beyond.length, all: found.compared.length }),
      found.beyond.length ? [` ${t("first-is")} `, operatorLink(found.beyond[0].key)] : null));
  }
  if (metric && found.byMetric !== "good" && found.byOutput === "good") lines.push(h("p", {}, t("metric-but-outputs")));
  if (metric && found.byMetric === "good" && found.byOutput === "bad") lines.push(h("p", {}, t("outputs-but-metric")));
  const severe = run.document.advice.filter((item) => item.severity === "error").length;
  if (severe) lines.push(h("p", {}, t("errors-found", { count: severe })));
  return h(
    "article", { class: `verdict ${found.grade}`, data: { grade: found.grade, run: run.position } },
    report.isDiff && h("h2", { class: `run-title run${run.position % 6}` }, run.label),
    h("div", { class: "verdict-line" }, icon(found.grade), h(report.isDiff ? "h3" : "h2", {}, t(metric || found.grade === "unknown" ? `verdict-${found.grade}` : `outputs-${found.grade}`, { model: run.document.first }))),
    metric && h("p", { class: "metric" }, h("span", { class: "quiet" }, metric.name), " ",
      cell(metric.first), h("span", { class: "quiet" }, ` ${run.document.first}`), " → ", cell(metric.second), h("span", { class: "quiet" }, ` ${run.document.second}`), " ",
      metric.higher_is_better ? signed(metric.second - metric.first) : h("span", { class: (found.drop ?? 0) > 0 ? "worse" : "better" }, show(metric.second - metric.first, 3))),
    !metric && h("p", { class: "quiet" }, t("no-metric")),
    lines);
}

/** @param {string} key */
function operatorLink(key) {
  return h("a", { class: "name", href: link({ op: key, view: "operators" }) }, key);
}

/** @param {Report} report @param {Run} run */
function advice(report, run) {
  const items = run.document.advice; // in the order of the document: what explains most of the error is first
  return h("div", { class: "advice", data: { run: run.position } },
    report.isDiff && h("h3", { class: `run-title run${run.position % 6}` }, run.label),
    items.length ? items.map((item) => adviceCard(run, item)) : h("p", { class: "empty" }, t("no-advice")));
}

/** @param {Run} run @param {Advice} item @param {boolean} [withLinks] to its operators */
export function adviceCard(run, item, withLinks = true) {
  const operators = withLinks ? item.operators.map((index) => run.operators[index]).filter(Boolean) : [];
  const shown = operators.slice(0, 6);
  const said = item.said[language()];
  return h(
    "article", { class: `card ${item.severity}`, data: { rule: item.rule } },
    icon(ICONS[item.severity] ?? "hint"),
    h("div", { class: "grow" },
      h("p", { class: "card-title" }, h("strong", {}, said.title), " ", h("span", { class: "tag" }, tOr(`severity-${item.severity}`, item.severity)), " ", (!withLinks || !run.byKey.has(item.place)) && h("code", {}, item.place)),
      h("p", { class: "evidence" }, prose(said.evidence)),
      h("p", { class: "remedy" }, h("span", { class: "try" }, `${t("try")}: `), prose(said.remedy)),
      item.configuration && code(item.configuration),
      shown.length > 0 && h("p", { class: "links" }, shown.map((operator) => [operatorLink(operator.key), " "]).flat(), operators.length > shown.length && t("and-more", { count: operators.length - shown.length }))));
}

/** @param {string} text */
function code(text) {
  const button = h("button", { type: "button", class: "copy", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = t("copied");
    } catch {
      getSelection()?.selectAllChildren(block);
    }
  } }, t("copy"));
  const block = h("code", {}, text);
  return h("pre", { class: "code", tabindex: 0 }, block, button);
}

/** @param {Report} report @param {Run} run @param {number} limit */
function losing(report, run, limit) {
  const found = run.losing(MOST_LOSING);
  const title = report.isDiff && h("h3", { class: `run-title run${run.position % 6}` }, run.label);
  if (!found.length) return h("div", {}, title, h("p", { class: "empty" }, t("no-loss")));
  return h("div", { class: "card block scroll-x", tabindex: 0, role: "region", "aria-label": report.isDiff ? `${t("where-lost")}, ${run.label}` : t("where-lost") }, title,
    h("table", { class: "small" },
      h("thead", {}, h("tr", {}, ["operator", "type", "format"].map((key) => h("th", { scope: "col" }, t(key))), ["incoming-error", "relative-error", "own-error", "same-input-error"].map((key) => h("th", { scope: "col", class: "numeric" }, t(key))))),
      h("tbody", {}, found.map((operator) => h("tr", {},
        h("th", { scope: "row" }, operatorLink(operator.key)), h("td", {}, operator.type), h("td", {}, badge(operator.format)),
        h("td", { class: "numeric" }, percent(run.incomingError(operator))), h("td", { class: "numeric" }, meter(relativeError(operator), limit)),
        h("td", { class: "numeric" }, cell(operator.own, percent(operator.own))), h("td", { class: "numeric" }, cell(operator.same_input_error)))))));
}

/** @param {Report} report @param {Run} run */
function formats(report, run) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const operator of run.operators) counts.set(operator.format, (counts.get(operator.format) ?? 0) + 1);
  const sorted = [...counts].sort((a, b) => b[1] - a[1]);
  const named = (/** @type {string} */ format) => (format ? shortFormat(format) : t("unknown-format"));
  return h("div", { class: "formats" },
    report.isDiff && h("h3", { class: `run-title run${run.position % 6}` }, run.label),
    run.operators.length
      ? [
        h("div", { class: "stack", "aria-hidden": "true" }, sorted.map(([format, count]) => h("span", { class: formatClass(format), style: { flexGrow: String(count) }, title: `${named(format)}: ${count}` }))),
        h("div", { class: "legend" }, sorted.map(([format, count]) => h("span", { class: `key ${formatClass(format)}` }, `${named(format)} · ${count}`))),
      ]
      : h("p", { class: "empty" }, t("no-operators")));
}

/** The operators that changed most between the first run and the last. @param {Report} report */
function changes(report) {
  const [one, other] = [report.runs[0], report.runs[report.runs.length - 1]];
  const pairs = report.rows.map((row) => ({ row, a: row.operators[one.position], b: row.operators[other.position] }));
  const both = pairs.filter(({ a, b }) => a && b && a.sqnr !== null && b.sqnr !== null && a.sqnr !== b.sqnr);
  both.sort((p, q) => Math.abs((q.b?.sqnr ?? 0) - (q.a?.sqnr ?? 0)) - Math.abs((p.b?.sqnr ?? 0) - (p.a?.sqnr ?? 0)));
  const only = pairs.filter(({ a, b }) => !a !== !b).length;
  return h("div", {},
    h("h2", {}, t("changes", { first: one.letter, second: other.letter })),
    only > 0 && h("p", { class: "note" }, t("only-in-one", { count: only })),
    both.length
      ? h("div", { class: "card block scroll-x", tabindex: 0, role: "region", "aria-label": t("changes", { first: one.letter, second: other.letter }) }, h("table", { class: "small", id: "changes" },
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("operator")), [one, other].map((run) => [h("th", { scope: "col" }, `${run.letter} ${t("format")}`), h("th", { scope: "col", class: "numeric" }, `${run.letter} ${t("sqnr")}`)]).flat(), h("th", { scope: "col", class: "numeric" }, "Δ dB"))),
        h("tbody", {}, both.slice(0, MOST_LOSING).map(({ row, a, b }) => h("tr", {},
          h("th", { scope: "row" }, operatorLink(row.key)), [a, b].map((o) => [h("td", {}, badge(o?.format ?? "")), h("td", { class: "numeric" }, cell(o?.sqnr, fixed(o?.sqnr, 2)))]).flat(), h("td", { class: "numeric" }, signed((b?.sqnr ?? 0) - (a?.sqnr ?? 0))))))))
      : h("p", { class: "empty" }, t("no-changes")));
}

/** @param {Report} report @param {Run} run */
function about(report, run) {
  const { document } = run;
  const items = [
    [t("title"), document.title], [t("compared"), `${document.first} → ${document.second} (${document.mode})`], [t("chip"), document.march],
    [t("operators"), show(run.operators.length)], [t("weights"), show(document.weights.length)], [t("batches"), document.batches ? show(document.batches) : ""], [t("version"), document.package_version],
  ].filter(([, value]) => value);
  return h("div", { class: "about" },
    h("dl", { class: "facts" }, items.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat()),
    document.notes.length > 0 && [h("h3", {}, t("notes")), h("ul", { class: "notes" }, document.notes.map((note) => h("li", {}, note)))]);
}

/** Runs that did not come to their end. @param {Report} report */
export function incompleteBanner(report) {
  const cut = report.runs.filter((run) => !run.document.is_complete);
  if (!cut.length) return null;
  const text = report.isDiff ? t("incomplete-runs", { runs: cut.map((run) => run.label).join(", ") }) : t("incomplete");
  return h("div", { class: "banner", role: "alert", id: "incomplete" }, icon("watch"), h("p", {}, text));
}

