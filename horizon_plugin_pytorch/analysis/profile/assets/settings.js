/** What the reader chose, kept by the browser where it keeps anything for files. */

/** @type {Record<string, string>} */
const here = {};

/** @param {string} name @returns {string | null} */
export function stored(name) {
  if (name in here) return here[name];
  try {
    return localStorage.getItem(`profiler.${name}`);
  } catch {
    return null;
  }
}

/** @param {string} name @param {string} value */
export function store(name, value) {
  here[name] = value;
  try {
    localStorage.setItem(`profiler.${name}`, value);
  } catch {
    // It lasts until the page is closed.
  }
}

/** @returns {"light" | "dark"} */
export function theme() {
  const chosen = stored("theme");
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** Colours of the style sheet, for what is drawn on a canvas. @param {string} name */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
