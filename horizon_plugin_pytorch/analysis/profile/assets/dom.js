/**
 * Elements made by functions. Text is always a text node: what a model's names contain is shown, never parsed.
 *
 * @typedef {Node | string | number | null | undefined | false} Child
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element. `on...` attributes are listeners, `style` and `data` are objects, null leaves an attribute out.
 *
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/**
 * An SVG element.
 *
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** @param {any} element @param {Record<string, any>} attributes @param {(Child | Child[])[]} children */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(child instanceof Node ? child : String(child));
    }
  }
  return element;
}

/**
 * A list to choose from, with its label.
 *
 * @param {string} label
 * @param {[string, string][]} options values with their texts
 * @param {string} value
 * @param {(value: string) => void} chosen
 * @param {Record<string, any>} [attributes] of the list
 */
export function choice(label, options, value, chosen, attributes = {}) {
  const list = h("select", { ...attributes, onchange: () => chosen(list.value) });
  for (const [key, text] of options) list.append(h("option", { value: key, selected: key === value }, text));
  return h("label", { class: "choice" }, h("span", {}, label), list);
}

/** A sign on a button, drawn: fonts do not have all of them. @param {"up" | "down" | "cross" | "link" | "tick" | string} kind */
export function sign(kind) {
  const paths = /** @type {Record<string, string>} */ ({
    up: "M8 13V3M3.5 7.5 8 3l4.5 4.5", down: "M8 3v10M3.5 8.5 8 13l4.5-4.5", cross: "M3.5 3.5l9 9M12.5 3.5l-9 9", tick: "M3 8.5 6.5 12 13 4.5",
    link: "M6.5 9.5a3 3 0 0 0 4.2 0l2.4-2.4a3 3 0 0 0-4.2-4.2L7.7 4M9.5 6.5a3 3 0 0 0-4.2 0L2.9 8.9a3 3 0 0 0 4.2 4.2L8.3 12",
    sun: "M8 1v2M8 13v2M1 8h2M13 8h2M3 3l1.4 1.4M11.6 11.6 13 13M13 3l-1.4 1.4M4.4 11.6 3 13M8 5a3 3 0 1 0 .01 0", moon: "M13 9.5A5.5 5.5 0 1 1 6.5 3a4.5 4.5 0 0 0 6.5 6.5Z",
  });
  return svg("svg", { class: "sign", viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: paths[kind] }));
}

/** @param {string} kind of the icon: a shape for each, so that colour alone says nothing */
export function icon(kind) {
  const shapes = {
    good: [svg("circle", { cx: 8, cy: 8, r: 7 }), svg("path", { d: "M4.5 8.2 7 10.7 11.5 5.6", class: "ink" })],
    watch: [svg("path", { d: "M8 1 15.3 14.3H.7Z" }), svg("path", { d: "M8 5.8v4M8 11.6v1", class: "ink" })],
    bad: [svg("path", { d: "M5 1h6l4 4v6l-4 4H5l-4-4V5Z" }), svg("path", { d: "M5.3 5.3 10.7 10.7M10.7 5.3 5.3 10.7", class: "ink" })],
    unknown: [svg("circle", { cx: 8, cy: 8, r: 7 }), svg("path", { d: "M4.5 8h7", class: "ink" })],
    hint: [svg("circle", { cx: 8, cy: 8, r: 7 }), svg("path", { d: "M8 7v4.6M8 4v1", class: "ink" })],
  };
  const drawn = /** @type {Record<string, any[]>} */ (shapes)[kind] ?? shapes.unknown;
  return svg("svg", { class: `icon ${kind}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, drawn);
}

/** A sentence in which `names` are code. @param {string} text @returns {Child[]} */
export function prose(text) {
  return text.split(/`([^`]+)`/).map((part, at) => (at % 2 ? h("code", {}, part) : part));
}
