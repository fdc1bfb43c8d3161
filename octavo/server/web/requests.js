// The unfinished requests by state, each with its reason where it waits.

import { count, h, seconds } from "./dom.js";

const MAX_SHOWN = 60;
const TITLES = { running: "Running", swapped: "Swapped out", waiting: "Waiting" };

/** Returns a short name of a request: its own id's end, and the sample where there are several. */
export function nameOf(request) {
  const id = (request.id || request.n).replace(/^(chatcmpl|cmpl|msg|resp|job)-/, "");
  const short = id.length > 12 ? `${id.slice(0, 8)}…` : id;
  return request.index ? `${short} #${request.index + 1}` : short;
}

export class RequestList {
  constructor(box, colours, { onhover }) {
    this.box = box;
    this.colours = colours;
    this.onhover = onhover;
    this.rows = new Map();
    this.heads = Object.fromEntries(
      Object.entries(TITLES).map(([state, title]) => [state, this.section(title)]),
    );
    this.nothing = h("p", { class: "nothing" }, "No requests.");
    this.rest = h("p", { class: "nothing" });
    box.append(this.nothing, ...Object.values(this.heads).map(({ element }) => element), this.rest);
  }

  section(title) {
    const list = h("ul", { class: "request-list" });
    const number = h("span", { class: "number" });
    const element = h("section", { "aria-label": title }, h("h3", {}, title, " ", number), list);
    return { element, list, number };
  }

  show(frame) {
    const requests = [...frame.requests.values()];
    const shown = requests.slice(0, MAX_SHOWN);
    const names = new Set(shown.map((request) => request.n));
    for (const [name, row] of this.rows) {
      if (names.has(name)) continue;
      row.element.remove();
      this.rows.delete(name);
    }
    for (const [state, { element, list, number }] of Object.entries(this.heads)) {
      const here = shown.filter((request) => request.state === state);
      element.hidden = !here.length;
      number.textContent = count(frame.queue[state] ?? here.length);
      here.forEach((request, at) => this.put(list, request, at));
    }
    this.nothing.hidden = requests.length > 0;
    const left = frame.queue.num_requests - shown.length;
    this.rest.textContent = left > 0 ? `and ${count(left)} more` : "";
  }

  put(list, request, at) {
    if (!this.rows.has(request.n)) this.rows.set(request.n, new RequestRow(request.n, this.colours, this.onhover));
    const row = this.rows.get(request.n);
    row.show(request);
    if (list.children[at] !== row.element) list.insertBefore(row.element, list.children[at] ?? null);
  }

  set focus(name) {
    for (const [other, row] of this.rows) row.element.classList.toggle("focused", other === name);
  }
}

class RequestRow {
  constructor(name, colours, onhover) {
    this.chip = h("span", { class: `chip c${colours.number(name)}`, "aria-hidden": "true" });
    this.title = h("span", { class: "request-name" });
    this.tokens = h("span", { class: "request-tokens" });
    this.note = h("span", { class: "request-note" });
    this.done = h("span", { class: "done" });
    this.bar = h("span", { class: `progress c${colours.number(name)}`, "aria-hidden": "true" }, this.done);
    this.element = h("li", { class: "request" }, this.chip, this.title, this.tokens, this.note, this.bar);
    this.element.addEventListener("mouseenter", () => onhover(name));
    this.element.addEventListener("mouseleave", () => onhover(""));
  }

  show(request) {
    setText(this.title, nameOf(request));
    setText(this.tokens, `${count(request.prompt_tokens)} + ${count(request.tokens)}`);
    setText(this.note, noteOf(request));
    const all = request.prompt_tokens + request.tokens;
    this.done.style.width = `${Math.min(100, (100 * request.computed_tokens) / Math.max(1, all))}%`;
    this.bar.hidden = request.state === "waiting";
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function noteOf(request) {
  const parts = [];
  if (request.state !== "running") {
    const why = request.waits_for ? `: ${request.waits_for}` : "";
    parts.push(`${seconds(request.waited_s)}${why}`);
  } else if (request.tokens === 0) {
    parts.push(`prefill, ${count(request.computed_tokens)} of ${count(request.prompt_tokens)}`);
  } else {
    parts.push(`${count(request.blocks)} blocks`);
  }
  if (request.cached_tokens) parts.push(`${count(request.cached_tokens)} cached`);
  if (request.preemptions) parts.push(`preempted ${request.preemptions}×`);
  return parts.join(" · ");
}
