// Elements, formats and announcements. Text always enters the page as text, never as HTML.

/** Returns a new element; attributes that begin with "on" are listeners, null ones are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Tells a screen reader. */
export function announce(text) {
  byId("status").textContent = text;
}

/** Shows a message of the page itself above the views; "" hides it. */
export function showBanner(text) {
  const banner = byId("banner");
  banner.textContent = text;
  banner.hidden = !text;
}

export const count = (value) => Math.round(value).toLocaleString("en");

export function seconds(value) {
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1%";
  return `${(share * 100).toFixed(share >= 0.0995 ? 0 : 1)}%`;
}

/** Returns a function that calls `draw` at most once a frame. */
export function eachFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

/** Reads a value that this tab keeps; `otherwise` where there is none. */
export function kept(name, otherwise) {
  try {
    const text = sessionStorage.getItem(`octavo.${name}`);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

/** Keeps a value in this tab; where the storage is full or closed the page works without it. */
export function keep(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(`octavo.${name}`);
    else sessionStorage.setItem(`octavo.${name}`, JSON.stringify(value));
  } catch {
    // A private window may refuse; nothing depends on it.
  }
}
