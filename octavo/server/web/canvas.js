// Drawing surfaces that are sharp on every screen, and the page's colours for them.

import { eachFrame, h } from "./dom.js";

export const NUM_COLOURS = 12;

/** The colours that the stylesheet gives, read again where the scheme changes. */
export class Colours {
  constructor() {
    this.order = new Map();
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

  /** Returns the number of a request's colour: in turns, in the order in which they are seen. */
  number(name) {
    if (!this.order.has(name)) this.order.set(name, this.order.size % NUM_COLOURS);
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
