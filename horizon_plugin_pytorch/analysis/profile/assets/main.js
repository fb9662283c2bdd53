/** The page: data are unpacked, then the views follow the address. */

import { detail } from "./detail.js";
import { h, sign } from "./dom.js";
import { graphView } from "./graph.js";
import { structureView, weightsView } from "./lists.js";
import { operatorsView } from "./operators.js";
import { incompleteBanner, overviewView } from "./overview.js";
import { Report } from "./report.js";
import { go, link, place, VIEWS } from "./route.js";
import { store, stored, theme } from "./settings.js";
import { language, otherLanguage, setLanguage, t } from "./text.js";

/** @typedef {{element: HTMLElement, update: () => void, focus: () => void, neighbour?: (step: number) => string | null}} View */

/** @returns {Promise<any>} */
async function unpacked() {
  const text = /** @type {HTMLElement} */ (document.getElementById("data")).textContent ?? "";
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

class Page {
  /** @param {Report} report */
  constructor(report) {
    this.report = report;
    this.root = /** @type {HTMLElement} */ (document.getElementById("page"));
    const asked = stored("task");
    /** The document's task counts, unless the reader chose one for a document without. */
    this.task = report.runs[0].document.task || (asked !== null && asked in KNOWN.tasks ? asked : "");
    /** @type {Map<string, View>} */
    this.views = new Map();
    addEventListener("hashchange", () => this.show());
    addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
    this.build();
  }

  /** All anew: in another language, in other colours, for another task. */
  build() {
    document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
    document.documentElement.dataset.theme = theme();
    this.views.clear();
    const other = otherLanguage();
    const { report } = this;
    const names = report.runs.map((run) => run.document.title).join(" / ");
    document.title = `${names} · ${t("page-title")}`;
    this.main = h("main", { id: "main", tabindex: -1 });
    this.aside = h("aside", { id: "detail", "aria-label": t("detail"), tabindex: 0 });
    this.nav = h("nav", { "aria-label": t("views") });
    this.help = this.helpDialog();
    const subtitle = report.isDiff ? t("runs-compared", { count: report.runs.length }) : [`${report.runs[0].document.first} → ${report.runs[0].document.second}`, report.runs[0].document.march].filter(Boolean).join(" · ");
    this.root.replaceChildren(
      h("header", { class: "top" },
        h("div", { class: "titles" }, h("h1", {}, names || t("page-title")), h("p", { class: "quiet" }, subtitle)),
        this.nav, h("span", { class: "spring" }),
        h("button", { type: "button", id: "language", lang: other.key === "zh" ? "zh-CN" : "en", onclick: () => { setLanguage(other.key); this.build(); this.focusOn("language"); } }, other.name),
        h("button", { type: "button", id: "theme", "aria-label": theme() === "dark" ? t("light") : t("dark"), title: theme() === "dark" ? t("light") : t("dark"), onclick: () => { store("theme", theme() === "dark" ? "light" : "dark"); this.build(); this.focusOn("theme"); } }, sign(theme() === "dark" ? "sun" : "moon")),
        h("button", { type: "button", id: "help", "aria-label": t("keys"), title: `${t("keys")} (?)`, onclick: () => this.help.showModal() }, "?")),
      ...[incompleteBanner(report)].filter((item) => item !== null),
      h("div", { class: "body" }, this.main, this.aside), this.help);
    this.show();
  }

  /** @param {string} id */
  focusOn(id) {
    document.getElementById(id)?.focus();
  }

  /** Follow the address. */
  show() {
    const { view, op } = place();
    const key = op === null ? null : this.report.keyOf(op);
    if (key !== op) {
      go({ op: key, view }, true);
      return; // the address is followed again
    }
    this.nav.replaceChildren(...VIEWS.map((name, at) => h("a", { href: link({ view: name }), data: { view: name }, "aria-current": name === view ? "page" : null, title: `${t(name)} (${at + 1})` }, t(name))));
    const found = this.view(view);
    if (this.main.firstChild !== found.element) this.main.replaceChildren(found.element);
    this.aside.hidden = op === null;
    this.root.classList.toggle("with-detail", op !== null);
    if (op !== null && (this.aside.dataset.key !== op || !this.aside.firstChild)) {
      this.aside.replaceChildren(detail(this.report, op, this.task, (step) => this.step(step)));
      this.aside.scrollTop = 0;
    }
    this.aside.dataset.key = op ?? "";
    found.update();
  }

  /** @param {string} name @returns {View} */
  view(name) {
    let found = this.views.get(name);
    if (!found) {
      /** @type {Record<string, () => View>} */
      const makers = {
        overview: () => overviewView(this.report, this.task, (task) => { this.task = task; store("task", task); this.build(); this.focusOn("task"); }),
        operators: () => operatorsView(this.report, this.task),
        graph: () => graphView(this.report, this.task),
        weights: () => weightsView(this.report),
        structure: () => structureView(this.report),
      };
      found = makers[name]();
      this.views.set(name, found);
    }
    return found;
  }

  /** To the operator before or after, in the order of the table. @param {number} step */
  step(step) {
    const table = this.view("operators");
    table.update();
    const key = table.neighbour?.(step);
    if (key !== null && key !== undefined) go({ op: key }, true);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || this.help.open) return;
    if (event.key === "Escape") {
      if (place().op !== null) {
        go({ op: null, view: place().view });
        this.view(place().view).focus();
      }
      return;
    }
    if (target.matches("input, select, textarea")) return;
    if (event.key === "/") {
      go({ view: "operators" });
      // The address is followed a moment later.
      setTimeout(() => this.focusOn("search"), 30);
    } else if (event.key === "?") this.help.showModal();
    else if (event.key === "[") this.step(-1);
    else if (event.key === "]") this.step(1);
    else if (/^[1-5]$/.test(event.key)) go({ view: VIEWS[Number(event.key) - 1] });
    else return;
    event.preventDefault();
  }

  helpDialog() {
    const keys = ["1 – 5", "/", "[ ]", "↑ ↓", "Enter", "Esc", "+ − 0", "?"];
    const texts = ["key-views", "key-search", "key-step", "key-move", "key-open", "key-close", "key-zoom", "key-help"];
    const dialog = h("dialog", { "aria-label": t("keys") }, h("h2", {}, t("keys")),
      h("dl", { class: "facts" }, keys.map((key, at) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, t(texts[at]))]).flat()),
      h("button", { type: "button", onclick: () => dialog.close() }, t("close")));
    return dialog;
  }
}

unpacked().then((data) => new Page(new Report(data))).catch((error) => {
  const root = /** @type {HTMLElement} */ (document.getElementById("page"));
  root.replaceChildren(h("p", { class: "loading", role: "alert" }, `This page could not be drawn; it needs a browser of 2023 or later. ${error}`));
  throw error;
});
