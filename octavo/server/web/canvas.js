// Drawing surfaces that are sharp on every screen, and the page's colours for them.

import { eachFrame, h } from "./dom.js";

export const NUM_COLOURS = 12;

/** The colours that the stylesheet gives, read again where the scheme changes. */
export class Colours {
  constructor() {
    this.order = new Map();
    this.next = -1;
    this.read();
    this.onchange = () => {};
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.read();
      this.onchange();
    });
  }

  read() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    this.requests = Array.from({ length: NUM_COLOURS }, (_, at) => of(`r${at}`));
    for (const name of ["paper", "raised", "ink", "soft", "rule", "free", "cached", "decode", "prefill", "accent", "sunk"]) {
      this[name] = of(name);
    }
    this.mono = of("mono");
    this.sans = of("sans");
  }

  /** Gives each request that has no colour yet the one that the fewest of these have. */
  assign(names) {
    const uses = new Array(NUM_COLOURS).fill(0);
    for (const name of names) if (this.order.has(name)) uses[this.order.get(name)] += 1;
    for (const name of names) {
      if (this.order.has(name)) continue;
      this.next = this.fewest(uses);
      this.order.set(name, this.next);
      uses[this.next] += 1;
    }
  }

  /** Returns the first colour after the last one given that is used least. */
  fewest(uses) {
    const least = Math.min(...uses);
    let at = this.next;
    do at = (at + 1) % NUM_COLOURS;
    while (uses[at] !== least);
    return at;
  }

  /** Returns the number of a request's colour. */
  number(name) {
    if (!this.order.has(name)) this.assign([name]);
    return this.order.get(name);
  }

  request(name) {
    return this.requests[this.number(name)];
  }
}

/** A canvas as wide as its box, with a height that `draw` is told. */
export class Surface {
  constructor(box, { label, height, draw }) {
    this.element = h("canvas", { role: "img", "aria-label": label });
    this.height = height;
    this.paint = draw;
    this.draw = eachFrame(() => this.redraw());
    box.append(this.element);
    new ResizeObserver(() => this.draw()).observe(box);
    this.box = box;
  }

  redraw() {
    const width = Math.floor(this.box.clientWidth);
    if (!width) return;
    const height = typeof this.height === "function" ? this.height(width) : this.height;
    const scale = devicePixelRatio || 1;
    const canvas = this.element;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    this.paint(context, width, height);
  }

  /** Returns where a pointer is on the surface. */
  at(event) {
    const { left, top } = this.element.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }
}
