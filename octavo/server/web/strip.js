// The steps as a strip: what each decoded above the line, what it prefilled below.

import { Surface } from "./canvas.js";
import { count, seconds } from "./dom.js";

const HEIGHT = 168;
const MIDDLE = 78;
const BAR = 7;
const LABELS = 58;

export class StepStrip {
  constructor(box, colours, { onhover }) {
    this.colours = colours;
    this.onhover = onhover;
    this.marks = [];
    this.shown = [];
    this.pointed = null;
    this.surface = new Surface(box, {
      label: "Steps: tokens decoded above the line, prompt tokens prefilled below it",
      height: HEIGHT,
      draw: (context, width) => this.paint(context, width),
    });
    box.addEventListener("mousemove", (event) => this.point(this.surface.at(event)[0]));
    box.addEventListener("mouseleave", () => this.point(null));
  }

  show(marks) {
    this.marks = marks;
    this.surface.draw();
  }

  point(x) {
    this.pointed = x;
    this.surface.draw();
  }

  paint(context, width) {
    const room = Math.floor((width - LABELS) / BAR);
    this.shown = this.marks.slice(-Math.max(1, room));
    const most = scaleOf(this.shown);
    this.axis(context, width, most);
    this.shown.forEach((mark, at) => this.bar(context, LABELS + at * BAR, mark, most));
    const pointed = this.pointed === null ? -1 : Math.floor((this.pointed - LABELS) / BAR);
    const mark = this.shown[pointed] ?? null;
    if (mark) {
      context.strokeStyle = this.colours.ink;
      context.lineWidth = 1;
      context.strokeRect(LABELS + pointed * BAR - 0.5, 4.5, BAR, HEIGHT - 9);
    }
    this.onhover(mark ? describe(mark) : this.shown.length ? describe(this.shown.at(-1)) : "No step yet");
  }

  axis(context, width, most) {
    const { colours } = this;
    context.fillStyle = colours.rule;
    context.fillRect(LABELS, MIDDLE, width - LABELS, 1);
    context.font = `11px ${colours.sans}`;
    context.fillStyle = colours.soft;
    context.textBaseline = "middle";
    context.fillText(count(most.decode), 0, 10);
    context.fillText("decode", 0, MIDDLE - 12);
    context.fillText("prefill", 0, MIDDLE + 14);
    context.fillText(count(most.prefill), 0, HEIGHT - 10);
  }

  bar(context, x, mark, most) {
    const { colours } = this;
    const above = (mark.decode / most.decode) * (MIDDLE - 6);
    const below = (mark.prefill / most.prefill) * (HEIGHT - MIDDLE - 8);
    context.fillStyle = colours.decode;
    if (above) context.fillRect(x, MIDDLE - Math.max(1, above), BAR - 1.5, Math.max(1, above));
    context.fillStyle = colours.prefill;
    if (below) context.fillRect(x, MIDDLE + 1, BAR - 1.5, Math.max(1, below));
  }
}

function scaleOf(marks) {
  return {
    decode: Math.max(4, ...marks.map((mark) => mark.decode)),
    prefill: Math.max(16, ...marks.map((mark) => mark.prefill)),
  };
}

function describe(mark) {
  return (
    `Step ${count(mark.step)}: ${count(mark.rows)} rows, ${count(mark.decode)} decoded, ` +
    `${count(mark.prefill)} prefilled, ${seconds(mark.ms / 1000)}`
  );
}
