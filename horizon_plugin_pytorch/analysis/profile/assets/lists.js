/** Weights, and what is known of the model's structure: calls, patterns, formats. */

import { h, icon, prose } from "./dom.js";
import { scaleOf } from "./detail.js";
import { cell, likeness, show } from "./numbers.js";
import { badge } from "./operators.js";
import { go, link, place } from "./route.js";
import { Table } from "./table.js";
import { t } from "./text.js";

/** @typedef {import("./report.js").Report} Report */
/** @typedef {import("./report.js").Run} Run */
/** @typedef {import("./report.js").Weight} Weight */

/** @param {Report} report */
export function weightsView(report) {
  const rows = report.runs.flatMap((run) => run.document.weights.map((weight) => ({ run, weight })));
  /** @typedef {{run: Run, weight: Weight}} Row */
  /** @type {(import("./table.js").Column<Row> | false)[]} */
  const columns = [
      { key: "name", label: t("weight"), width: 52, value: ({ weight }) => weight.name, show: ({ weight }) => h("span", { class: "name", title: weight.name }, weight.name) },
      report.isDiff && { key: "run", label: t("run"), value: ({ run }) => run.letter, show: ({ run }) => h("span", { title: run.label }, run.letter) },
      { key: "format", label: t("format"), value: ({ weight }) => weight.format, show: ({ weight }) => badge(weight.format) },
      { key: "similarity", label: t("similarity"), numeric: true, value: ({ weight }) => weight.similarity, show: ({ weight }) => cell(weight.similarity, likeness(weight.similarity)) },
      { key: "atol", label: t("atol"), hint: t("atol-hint"), numeric: true, first: "down", value: ({ weight }) => weight.atol, show: ({ weight }) => cell(weight.atol) },
      { key: "scale", label: t("scale"), numeric: true, width: 34, first: "down", value: ({ weight }) => weight.scale, show: ({ weight }) => scaleOf(weight) },
      { key: "low", label: t("low"), numeric: true, value: ({ weight }) => weight.first?.low ?? null, show: ({ weight }) => cell(weight.first?.low) },
      { key: "high", label: t("high"), numeric: true, first: "down", value: ({ weight }) => weight.first?.high ?? null, show: ({ weight }) => cell(weight.first?.high) },
  ];
  const table = new Table(
    /** @type {import("./table.js").Column<Row>[]} */ (columns.filter(Boolean)),
    rows,
    {
      label: t("weights"), empty: t("no-weights"), keyOf: ({ run, weight }) => `${run.position}:${weight.name}`,
      opened: ({ run, weight }, isStep) => { if (weight.operator !== null) go({ op: run.operators[weight.operator].key, view: "weights" }, isStep); },
    });
  return {
    element: h("div", { class: "view fixed" }, h("p", { class: "toolbar quiet" }, t("weights-hint")), table.element),
    update: () => {
      const { op } = place();
      const isShown = (/** @type {Row} */ { run, weight }) => weight.operator !== null && run.operators[weight.operator].key === op;
      const current = table.rows[table.current];
      // An operator may have several weights: the one that was chosen stays.
      const row = current && isShown(current) ? current : table.rows.find(isShown);
      table.select(row ? `${row.run.position}:${row.weight.name}` : null);
    },
    focus: () => table.element.focus(),
  };
}

/** @param {Report} report */
export function structureView(report) {
  const element = h("div", { class: "view scroll" }, h("div", { class: "column" }, report.runs.map((run) => structure(report, run))));
  return { element, update: () => {}, focus: () => {} };
}

/** @param {Report} report @param {Run} run */
function structure(report, run) {
  const { called, unfused, messages } = run.document;
  // Once is as it should be: what was called more often, or never, is worth a look, and comes first.
  const sorted = called.filter((item) => item.count !== 1).sort((a, b) => Number(a.count > 0) - Number(b.count > 0) || b.count - a.count);
  sorted.push(...called.filter((item) => item.count === 1));
  return h("div", {},
    report.isDiff && h("h2", { class: `run-title run${run.position % 6}` }, run.label),
    h("h2", {}, t("configuration")),
    messages.length
      ? messages.map((item) => h("article", { class: "card warning" }, icon("watch"), h("div", {}, h("p", { class: "card-title" }, named(run, item.name), " ", h("span", { class: "quiet" }, item.type)), h("p", {}, prose(item.text)), item.remedy && h("p", {}, h("span", { class: "try" }, `${t("try")}: `), prose(item.remedy)))))
      : h("p", { class: "empty" }, t("no-messages")),
    h("h2", {}, t("unfused")),
    unfused.length
      ? h("ul", { class: "plain" }, unfused.map((pattern) => h("li", {}, pattern.map((name, at) => [at ? " + " : null, named(run, name)]).flat())))
      : h("p", { class: "empty" }, t("no-unfused")),
    h("h2", {}, t("call-counts")),
    h("p", { class: "quiet" }, called.length ? t("call-summary", { once: called.filter((item) => item.count === 1).length, all: called.length }) : null),
    called.length ? h("div", { class: "card block short" }, callTable(report, run, sorted)) : h("p", { class: "empty" }, t("no-calls")));
}

/** @param {Report} report @param {Run} run @param {{name: string, count: number}[]} called */
function callTable(report, run, called) {
  /** @param {number} count */
  const remark = (count) => (count === 0 ? t("never-called") : count > 1 ? t("shared-module") : "");
  const table = new Table(
    [
      { key: "module", label: t("module"), width: 60, value: (item) => item.name, show: (item) => named(run, item.name) },
      { key: "calls", label: t("calls"), numeric: true, first: "down", value: (item) => item.count, show: (item) => show(item.count) },
      { key: "remark", label: t("remark"), width: 60, value: (item) => remark(item.count) },
    ],
    called,
    { label: report.isDiff ? `${t("call-counts")}, ${run.label}` : t("call-counts"), empty: t("no-calls"), keyOf: (item) => item.name, opened: (item, isStep) => { const op = run.keyOf(item.name); if (op !== null) go({ op, view: "structure" }, isStep); } });
  return table.element;
}

/** A module's name, as a link if an operator has it. @param {Run} run @param {string} name */
function named(run, name) {
  const op = run.keyOf(name);
  return op === null ? h("code", {}, name) : h("a", { class: "name", href: link({ op, view: "structure" }) }, name);
}
