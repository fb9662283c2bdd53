/** Where the reader is: in the address, so that a link leads there. */

/**
 * @typedef {{view: string, op: string | null, run: number}} Place
 */

export const VIEWS = ["overview", "operators", "graph", "weights", "structure"];

/** @returns {Place} */
export function place() {
  const found = new URLSearchParams(location.hash.slice(1));
  const op = found.get("op");
  const view = found.get("view") ?? (op === null ? "overview" : "operators");
  return { view: VIEWS.includes(view) ? view : "overview", op, run: Math.max(0, Number(found.get("run")) || 0) };
}

/** The address of a place. @param {Partial<Place>} changes to where the reader is */
export function link(changes) {
  const next = { ...place(), ...changes };
  const found = [];
  if (next.view !== (next.op === null ? "overview" : "operators")) found.push(`view=${next.view}`);
  if (next.op !== null) found.push(`op=${encodeURIComponent(next.op)}`);
  if (next.run) found.push(`run=${next.run}`);
  return `#${found.join("&")}`;
}

/** @param {Partial<Place>} changes @param {boolean} [isStep] of many: the way back does not lead through all of them */
export function go(changes, isStep = false) {
  const next = link(changes);
  if (next === (location.hash || "#")) return;
  if (isStep) location.replace(next);
  else location.hash = next;
}
