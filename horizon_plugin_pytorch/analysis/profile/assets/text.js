/** Texts in the reader's language. */

import { stored, store } from "./settings.js";

const LANGUAGES = { en: "English", zh: "中文" };

/** @returns {"en" | "zh"} */
export function language() {
  const chosen = stored("language") ?? navigator.language;
  return chosen.toLowerCase().startsWith("zh") ? "zh" : "en";
}

/** @param {string} chosen */
export function setLanguage(chosen) {
  store("language", chosen);
}

/** What the switch says: the name of the other language, in that language. */
export function otherLanguage() {
  const other = language() === "en" ? "zh" : "en";
  return { key: other, name: LANGUAGES[other] };
}

/**
 * A text, with its `{places}` filled.
 *
 * @param {string} key
 * @param {Record<string, string | number>} [values]
 */
export function t(key, values = {}) {
  const text = KNOWN.texts[language()][key];
  if (text === undefined) throw new Error(`There is no text ${key}`);
  return text.replace(/\{(\w+)\}/g, (/** @type {string} */ _, /** @type {string} */ name) => String(values[name]));
}

/**
 * A text that may not be there, as that of a rule that a later version knows.
 *
 * @param {string} key
 * @param {string} otherwise
 */
export function tOr(key, otherwise) {
  return KNOWN.texts[language()][key] ?? otherwise;
}
