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
