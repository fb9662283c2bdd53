/**
 * The documents, joined by the names of their operators, and what they mean.
 *
 * @typedef {{low: number, high: number, counts: number[]}} Histogram
 * @typedef {{low: number|null, high: number|null, mean: number|null, var: number|null, nan: number, inf: number,
 *            histogram: Histogram|null, channels: number|null, dead: number|null, ranges: [number, number][]}} Values
 * @typedef {{index: number, name: string, path: string, type: string, line: string, inputs: number[], shape: number[],
 *            format: string, input_formats: string[], reason: string, scale: number|null, scale_low: number|null,
 *            grid: [number, number]|null, saturation: number|null, at_end: number|null, similarity: number|null, sqnr: number|null,
 *            atol: number|null, error: number|null, same_input_error: number|null, first: Values|null,
 *            second: Values|null, key: string, own: number|null}} Operator
 * @typedef {{name: string, operator: number|null, format: string, similarity: number|null, atol: number|null,
 *            scale: number|null, scale_low: number|null, first: Values|null, second: Values|null}} Weight
 * @typedef {{rule: string, severity: string, place: string, operators: number[], configuration: string, explains: number|null,
 *            said: Record<string, {title: string, evidence: string, remedy: string}>}} Advice
 * @typedef {{title: string, mode: string, first: string, second: string, march: string, package_version: string,
 *            similarity_function: string, threshold: number|null, task: string,
 *            metric: {name: string, first: number, second: number, higher_is_better: boolean}|null,
 *            operators: Operator[], weights: Weight[], called: {name: string, count: number}[], unfused: string[][],
 *            messages: {name: string, type: string, text: string, remedy: string}[], advice: Advice[],
 *            notes: string[], batches: number, inputs: string, is_complete: boolean, outputs: number[], keys: Record<number, string>}} Document
 * @typedef {{path: string, label: string, members: [string, number, number, number][], routes: number[][]}} Box
 * @typedef {{key: string, position: number, operators: (Operator|null)[]}} Row
 * @typedef {"good" | "watch" | "bad" | "unknown"} Grade
 */

import { number } from "./numbers.js";

const OPERATOR_NUMBERS = ["scale", "scale_low", "saturation", "at_end", "similarity", "sqnr", "atol", "error", "same_input_error"];

/** One document with what is derived from it. */
export class Run {
  /** @param {Document} document @param {Box[]} boxes @param {number} position @param {number} count of runs */
  constructor(document, boxes, position, count) {
    this.document = document;
    this.boxes = boxes;
    this.position = position;
    this.letter = String.fromCharCode(65 + (position % 26));
    this.label = count > 1 ? `${this.letter} · ${document.title}` : document.title;
    this.operators = document.operators;
    /** @type {Map<string, Operator>} */
    this.byKey = new Map();
    /** @type {number[][]} */
    this.consumers = document.operators.map(() => []);
    readNumbers(document);
    for (const operator of this.operators) {
      operator.key = document.keys[operator.index] ?? operator.name;
      this.byKey.set(operator.key, operator);
      for (const source of operator.inputs) this.consumers[source]?.push(operator.index);
    }
    for (const operator of this.operators) operator.own = this.ownError(operator);
    this.keyOfPath = new Map(this.operators.filter((o) => o.path && !o.key.includes("[")).reverse().map((o) => [o.path, o.key]));
  }

  /** The key of an operator by its key, or by the path of its module: advice and configurations name modules. @param {string} name */
  keyOf(name) {
    return this.byKey.has(name) ? name : this.keyOfPath.get(name) ?? null;
  }

  /** The threshold of similarity: the document's, or the usual one; null for a function that nobody knows. */
  get threshold() {
    return this.document.threshold ?? KNOWN.metrics[this.document.similarity_function]?.threshold ?? null;
  }

  get higherIsBetter() {
    return KNOWN.metrics[this.document.similarity_function]?.higher_is_better ?? false;
  }

  /** Whether an operator's similarity is beyond the threshold. @param {Operator} operator */
  isBeyond(operator) {
    if (operator.similarity === null || this.threshold === null) return false;
    if (Number.isNaN(operator.similarity)) return true;
    return this.higherIsBetter ? operator.similarity < this.threshold : operator.similarity > this.threshold;
  }

  /** The operators that give what the model returns. */
  get outputs() {
    return this.document.outputs.map((index) => this.operators[index]);
  }

  /**
   * The power of the error that an operator adds to the largest one that came in, relative to its result.
   *
   * @param {Operator} operator
   */
  ownError(operator) {
    const mine = relativeError(operator);
    if (mine === null) return null;
    const incoming = this.incomingError(operator);
    // What comes in as NaN, or without measure, is not this operator's doing.
    if (Number.isNaN(incoming) || mine <= incoming) return 0;
    return Math.sqrt(mine ** 2 - incoming ** 2);
  }

  /** The largest relative error that comes in. @param {Operator} operator */
  incomingError(operator) {
    const sources = operator.inputs.map((source) => this.operators[source]).filter(Boolean);
    return Math.max(0, ...sources.map((source) => relativeError(source) ?? 0));
  }

  /** What adds most of the error, first. @param {number} count */
  losing(count) {
    const found = this.operators.filter((operator) => (operator.own ?? 0) > 0 || Number.isNaN(operator.own ?? 0));
    return found.sort((a, b) => rank(b.own) - rank(a.own)).slice(0, count);
  }
}

/** @param {number | null} value NaN is worse than anything */
function rank(value) {
  return Number.isNaN(value) ? Infinity : (value ?? 0);
}

/** All runs. */
export class Report {
  /** @param {{documents: Document[], layouts: Box[][], layout_of: number[]}} data */
  constructor(data) {
    const count = data.documents.length;
    this.runs = data.documents.map((document, at) => new Run(document, data.layouts[data.layout_of[at]], at, count));
    this.isDiff = count > 1;
    /** Whether all runs saw the same inputs, as far as they say. */
    this.hasSameInputs = new Set(data.documents.map((document) => document.inputs).filter(Boolean)).size <= 1;
    /** @type {Row[]} */
    this.rows = [];
    /** @type {Map<string, Row>} */
    this.byKey = new Map();
    for (const run of this.runs) {
      for (const operator of run.operators) {
        let row = this.byKey.get(operator.key);
        if (!row) {
          row = { key: operator.key, position: this.rows.length, operators: this.runs.map(() => null) };
          this.byKey.set(operator.key, row);
          this.rows.push(row);
        }
        row.operators[run.position] = operator;
      }
    }
  }

  /** As that of a run; the name itself if no run knows it. @param {string} name */
  keyOf(name) {
    return this.byKey.has(name) ? name : this.runs.map((run) => run.keyOf(name)).find((key) => key !== null) ?? name;
  }
}

/** The root of the power of the error to that of the result: 0.1 is 20 dB. @param {Operator} operator */
export function relativeError(operator) {
  if (operator.sqnr === null) return null;
  return operator.sqnr === Infinity ? 0 : 10 ** (-operator.sqnr / 20);
}

/** @param {string} task */
export function limitOf(task) {
  return KNOWN.tasks[task] ?? KNOWN.tasks[""];
}

/** Which of the five colours an error has. @param {number | null} error @param {number} limit */
export function errorClass(error, limit) {
  if (error === null) return -1;
  if (Number.isNaN(error)) return 4;
  return [limit / 10, limit / 3, limit, limit * KNOWN.bounds.error_bad].filter((end) => error > end).length;
}

/**
 * The verdict on a run: its grade, and what it rests on.
 *
 * @param {Run} run @param {number} limit
 */
export function judge(run, limit) {
  const outputs = run.outputs.filter((operator) => relativeError(operator) !== null);
  outputs.sort((a, b) => rank(relativeError(b)) - rank(relativeError(a)));
  const beyond = run.operators.filter((operator) => run.isBeyond(operator));
  const compared = run.operators.filter((operator) => operator.similarity !== null);
  const metric = run.document.metric;
  /** @type {Grade} */
  let byOutput = "unknown";
  if (outputs.length) byOutput = gradeOf(relativeError(outputs[0]), limit);
  else if (compared.length && run.threshold !== null) byOutput = "good";
  // A sigmoid at the end hides what happens before it: outputs that are alike are not enough.
  const hasErrors = run.document.advice.some((item) => item.severity === "error");
  if (byOutput === "good" && (beyond.length || hasErrors)) byOutput = "watch";
  /** @type {Grade} */
  let byMetric = "unknown";
  /** @type {number | null} */
  let drop = null;
  if (metric) {
    drop = (metric.first - metric.second) * (metric.higher_is_better ? 1 : -1);
    const share = metric.first === 0 ? (drop > 0 ? Infinity : 0) : drop / Math.abs(metric.first);
    byMetric = Number.isNaN(share) || share > KNOWN.bounds.metric_bad ? "bad" : share > KNOWN.bounds.metric_watch ? "watch" : "good";
  }
  return { grade: metric ? byMetric : byOutput, byOutput, byMetric, drop, worst: outputs[0] ?? null, beyond, compared };
}

/** @param {number | null} error @param {number} limit @returns {Grade} */
function gradeOf(error, limit) {
  if (error === null) return "unknown";
  if (Number.isNaN(error) || error > limit * KNOWN.bounds.error_bad) return "bad";
  return error > limit ? "watch" : "good";
}

/** What concerns an operator: advice by its index, messages by its module. @param {Run} run @param {Operator} operator */
export function remarksOn(run, operator) {
  const { advice, messages, called, unfused, weights } = run.document;
  return {
    advice: advice.filter((item) => item.operators.includes(operator.index)),
    messages: messages.filter((item) => item.name === operator.name || item.name === operator.path),
    called: called.find((item) => item.name === operator.path) ?? null,
    unfused: unfused.filter((pattern) => pattern.includes(operator.path) || pattern.includes(operator.name)),
    weights: weights.filter((item) => item.operator === operator.index),
  };
}

/** @param {Document} document */
function readNumbers(document) {
  document.threshold = number(document.threshold);
  if (document.metric) {
    document.metric.first = /** @type {number} */ (number(document.metric.first));
    document.metric.second = /** @type {number} */ (number(document.metric.second));
  }
  for (const item of /** @type {any[]} */ ([...document.operators, ...document.weights])) {
    for (const name of OPERATOR_NUMBERS) if (name in item) item[name] = number(item[name]);
    if (item.grid) item.grid = item.grid.map(number);
    for (const values of [item.first, item.second]) {
      if (values) for (const name of ["low", "high", "mean", "var"]) values[name] = number(values[name]);
    }
  }
}
