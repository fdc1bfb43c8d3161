// The KV blocks of one cache group, a cell each, coloured by the request that holds them.

import { Surface } from "./canvas.js";
import { count, h } from "./dom.js";
import { CACHED, FREE, SHARED, SWAPPED } from "./feed.js";

const SIZES = [26, 22, 18, 16, 14, 12, 10, 8, 6, 5, 4, 3];
const MAX_HEIGHT = 300;
const NAMES = ["free", "free, cached", "in use", "shared", "in host memory"];

export class BlockMap {
  constructor(colours, { onhover, title }) {
    this.colours = colours;
    this.onhover = onhover;
    this.group = null;
    this.focus = "";
    this.cursor = -1;
    this.host = new Uint8Array(0);
    this.hostOwners = [];
    const box = h("div", { class: "map-box", tabindex: "0", role: "group",
      "aria-label": `${title}; arrow keys go from block to block` });
    this.surface = new Surface(box, {
      label: title,
      height: (width) => this.layout(width),
      draw: (context) => this.paint(context),
    });
    this.caption = h("p", { class: "map-caption" });
    this.element = h("div", { class: "map" }, this.caption, box);
    box.addEventListener("mousemove", (event) => this.point(this.cellAt(...this.surface.at(event))));
    box.addEventListener("mouseleave", () => this.point(-1));
    box.addEventListener("blur", () => this.point(-1));
    box.addEventListener("keydown", (event) => this.move(event));
  }

  show(group, caption) {
    this.group = group;
    this.readHost(group);
    this.caption.textContent = caption;
    this.surface.draw();
    if (this.cursor >= 0) this.tell();
  }

  readHost({ hostRuns }) {
    const end = Math.max(0, ...hostRuns.map(([first, length]) => first + length));
    this.host = new Uint8Array(end);
    this.hostOwners = new Array(end).fill("");
    for (const [first, length, , owner] of hostRuns) {
      this.host.fill(1, first, first + length);
      this.hostOwners.fill(owner, first, first + length);
    }
  }

  get numCells() {
    return this.group ? this.group.states.length : 0;
  }

  /** Chooses the largest cells that fit, and returns the height that they take. */
  layout(width) {
    const fits = (size) => this.rowsOf(width, size) * size <= MAX_HEIGHT;
    this.size = SIZES.find(fits) ?? SIZES.at(-1);
    this.columns = Math.max(1, Math.floor(width / this.size));
    this.rows = Math.ceil(this.numCells / this.columns);
    const hostRows = Math.ceil(this.host.length / this.columns);
    this.hostTop = this.rows * this.size + 24;
    return this.rows * this.size + (hostRows ? 24 + hostRows * this.size : 0) + 1;
  }

  rowsOf(width, size) {
    return Math.ceil(this.numCells / Math.max(1, Math.floor(width / size)));
  }

  paint(context) {
    if (!this.group) return;
    const { states, owners } = this.group;
    for (let at = 0; at < states.length; at += 1) this.cell(context, at, states[at], owners[at], 0);
    if (this.host.length) {
      context.fillStyle = this.colours.soft;
      context.font = `12px ${this.colours.sans}`;
      context.fillText("host memory", 0, this.hostTop - 7);
    }
    this.host.forEach((held, at) => {
      if (held) this.cell(context, at, SWAPPED, this.hostOwners[at], this.hostTop);
    });
    if (this.cursor >= 0) this.frameCursor(context);
  }

  cell(context, at, state, owner, top) {
    const { size, colours } = this;
    const gap = size > 5 ? 1.5 : size > 3 ? 1 : 0.5;
    const x = (at % this.columns) * size;
    const y = top + Math.floor(at / this.columns) * size;
    const side = size - gap;
    context.globalAlpha = this.focus && owner !== this.focus ? 0.22 : 1;
    if (state === SWAPPED) {
      context.strokeStyle = colours.request(owner);
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, y + 0.75, side - 1.5, side - 1.5);
    } else {
      context.fillStyle = state === FREE ? colours.free : state === CACHED ? colours.cached : colours.request(owner);
      context.fillRect(x, y, side, side);
    }
    if (state === SHARED) this.notch(context, x, y, side);
    context.globalAlpha = 1;
  }

  /** Marks a shared block by a corner that is cut off. */
  notch(context, x, y, side) {
    context.fillStyle = this.colours.paper;
    context.beginPath();
    context.moveTo(x + side, y);
    context.lineTo(x + side, y + side * 0.6);
    context.lineTo(x + side * 0.4, y);
    context.fill();
  }

  frameCursor(context) {
    const x = (this.cursor % this.columns) * this.size;
    const y = Math.floor(this.cursor / this.columns) * this.size;
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 1.5;
    context.strokeRect(x - 0.75, y - 0.75, this.size, this.size);
  }

  cellAt(x, y) {
    const column = Math.floor(x / this.size);
    const at = Math.floor(y / this.size) * this.columns + column;
    return column >= 0 && column < this.columns && at >= 0 && at < this.numCells ? at : -1;
  }

  point(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    this.tell();
    this.surface.draw();
  }

  tell() {
    if (this.cursor < 0) return this.onhover("", "");
    const owner = this.group.owners[this.cursor];
    const state = this.group.states[this.cursor];
    return this.onhover(owner, `Block ${count(this.cursor)}: ${NAMES[state]}`);
  }

  move(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns };
    if (event.key === "Home") this.point(0);
    else if (event.key === "End") this.point(this.numCells - 1);
    else if (steps[event.key]) {
      this.point(Math.max(0, Math.min(this.numCells - 1, this.cursor + steps[event.key])));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
