/** A table of which only the rows in view are elements. */

import { h } from "./dom.js";

const ROW = 30;
const SPARE = 8;

/**
 * @template T
 * @typedef {{
 *   key: string, label: string, hint?: string, numeric?: boolean, width?: number,
 *   value: (row: T) => any, show?: (row: T) => any, first?: "up" | "down",
 * }} Column
 */

/**
 * Sorted by a click on a column's title; up and down move the selection, Enter opens it.
 *
 * @template T
 */
export class Table {
  /**
   * @param {Column<T>[]} columns
   * @param {T[]} rows
   * @param {{label: string, empty: string, keyOf: (row: T) => string, opened: (row: T, isStep: boolean) => void}} settings
   */
  constructor(columns, rows, settings) {
    this.columns = columns;
    this.all = rows;
    this.settings = settings;
    /** @type {T[]} */
    this.rows = rows;
    /** @type {{key: string, up: boolean} | null} */
    this.order = null;
    /** @type {string | null} */
    this.selected = null;
    this.current = 0;
    this.isDrawing = false;
    this.body = h("tbody", {});
    this.head = h("thead", {});
    this.table = h("table", { class: "virtual", "aria-label": settings.label }, this.widths(), this.head, this.body);
    this.empty = h("p", { class: "empty", hidden: true }, settings.empty);
    this.element = h(
      "div", { class: "scroller", tabindex: 0, role: "region", "aria-label": settings.label, onscroll: () => this.schedule(), onkeydown: (/** @type {KeyboardEvent} */ e) => this.key(e) },
      this.table, this.empty);
    new ResizeObserver(() => this.schedule()).observe(this.element);
    this.drawHead();
    this.arrange();
  }

  /** Columns keep their widths whichever rows are in view. */
  widths() {
    const widths = this.columns.map((column) => {
      const title = column.label.length + 4;
      if (column.numeric) return Math.max(title, column.width ?? 12);
      const longest = this.all.reduce((most, row) => Math.max(most, String(column.value(row) ?? "").length), 0);
      return Math.max(title, Math.min(longest + 3, column.width ?? 24));
    });
    return h("colgroup", {}, widths.map((width) => h("col", { style: { width: `${width}ch` } })));
  }

  /** Show the rows that a test lets through. @param {(row: T) => boolean} test */
  filter(test) {
    this.shown = this.all.filter(test);
    this.arrange();
    this.element.scrollTop = 0;
  }

  /** @param {string} key @param {boolean} up */
  sort(key, up) {
    this.order = { key, up };
    this.drawHead();
    this.arrange();
  }

  /** Mark a row, and bring it into view. @param {string | null} key */
  select(key) {
    this.selected = key;
    const at = this.rows.findIndex((row) => this.settings.keyOf(row) === key);
    if (at >= 0) {
      this.current = at;
      this.bringIntoView(at);
    }
    this.draw();
  }

  /** The key of the row a number of places after the selected one. @param {number} step */
  neighbour(step) {
    const at = this.rows.findIndex((row) => this.settings.keyOf(row) === this.selected);
    const next = this.rows[at < 0 ? 0 : at + step];
    return next === undefined ? null : this.settings.keyOf(next);
  }

  arrange() {
    const rows = [...(this.shown ?? this.all)];
    if (this.order) {
      const { key, up } = this.order;
      const column = /** @type {Column<T>} */ (this.columns.find((item) => item.key === key));
      rows.sort((a, b) => compare(column.value(a), column.value(b), up));
    }
    this.rows = rows;
    this.current = Math.max(0, rows.findIndex((row) => this.settings.keyOf(row) === this.selected));
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.empty.hidden = rows.length > 0;
    this.draw();
  }

  drawHead() {
    const cells = this.columns.map((column) => {
      const sorted = this.order?.key === column.key ? (this.order.up ? "ascending" : "descending") : "none";
      const button = h("button", {
        type: "button", title: column.hint ?? column.label, data: { column: column.key },
        onclick: () => this.sort(column.key, sorted === "none" ? column.first !== "down" : sorted === "descending"),
      }, column.label, h("span", { class: "arrow", "aria-hidden": "true" }, sorted === "none" ? "" : sorted === "ascending" ? " ▲" : " ▼"));
      return h("th", { scope: "col", "aria-sort": sorted, class: column.numeric ? "numeric" : null }, button);
    });
    const focused = this.head.contains(document.activeElement) ? /** @type {HTMLElement} */ (document.activeElement).dataset.column : null;
    this.head.replaceChildren(h("tr", { "aria-rowindex": 1 }, cells));
    if (focused) [...this.head.querySelectorAll("button")].find((button) => button.dataset.column === focused)?.focus();
  }

  schedule() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.draw();
    });
  }

  draw() {
    const height = this.element.clientHeight || 600;
    const from = Math.max(0, Math.floor(this.element.scrollTop / ROW) - SPARE);
    const to = Math.min(this.rows.length, Math.ceil((this.element.scrollTop + height) / ROW) + SPARE);
    const shown = this.rows.slice(from, to).map((row, n) => this.drawRow(row, from + n));
    this.body.replaceChildren(space(from * ROW, this.columns.length), ...shown, space((this.rows.length - to) * ROW, this.columns.length));
  }

  /** @param {T} row @param {number} at */
  drawRow(row, at) {
    const key = this.settings.keyOf(row);
    const cells = this.columns.map((column, n) => {
      const content = column.show ? column.show(row) : column.value(row);
      const attributes = { class: column.numeric ? "numeric" : null };
      return n === 0 ? h("th", { scope: "row", ...attributes }, content) : h("td", attributes, content);
    });
    return h("tr", {
      "aria-rowindex": at + 2, "aria-selected": key === this.selected ? "true" : null, data: { key },
      class: key === this.selected ? "selected" : at === this.current ? "current" : null,
      onclick: () => this.settings.opened(row, false),
    }, cells);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.target !== this.element || !this.rows.length) return;
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW) - 2);
    const last = this.rows.length - 1;
    const moves = /** @type {Record<string, number>} */ ({
      ArrowDown: this.current + 1, ArrowUp: this.current - 1, PageDown: this.current + page, PageUp: this.current - page, Home: 0, End: last,
    });
    if (event.key in moves) {
      this.current = Math.max(0, Math.min(last, moves[event.key]));
      this.bringIntoView(this.current);
      this.settings.opened(this.rows[this.current], true);
    } else if (event.key === "Enter" || event.key === " ") {
      this.settings.opened(this.rows[this.current], false);
    } else {
      return;
    }
    event.preventDefault();
  }

  /** @param {number} at */
  bringIntoView(at) {
    const head = this.head.offsetHeight;
    const room = this.element.clientHeight - head;
    if (room <= 0) return;
    const top = at * ROW;
    if (top < this.element.scrollTop) this.element.scrollTop = top;
    else if (top + ROW > this.element.scrollTop + room) this.element.scrollTop = top + ROW - room;
  }
}

/** @param {number} height @param {number} columns */
function space(height, columns) {
  return h("tr", { class: "space", "aria-hidden": "true", style: { height: `${height}px` } }, h("td", { colspan: columns }));
}

/** What has no value comes last, NaN first, whichever way. @param {any} a @param {any} b @param {boolean} up */
function compare(a, b, up) {
  const [one, other] = [a, b].map((value) => (value === null || value === undefined ? 1 : Number.isNaN(value) ? -1 : 0));
  if (one || other) return one - other;
  const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a < b ? -1 : a > b ? 1 : 0;
  return up ? order : -order;
}
