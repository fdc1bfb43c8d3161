// A line for each request: when it waited, was prefilled, decoded, and was swapped out.

import { Surface } from "./canvas.js";
import { seconds } from "./dom.js";
import { nameOf } from "./requests.js";

const ROW = 18;
const MAX_ROWS = 20;
const LABELS = 108;
const FOOT = 20;

export class Timelines {
  constructor(box, colours, { onhover }) {
    this.colours = colours;
    this.onhover = onhover;
    this.lines = [];
    this.span = [0, 1];
    this.focus = "";
    this.surface = new Surface(box, {
      label: "Request timelines",
      height: () => Math.max(3, this.lines.length) * ROW + FOOT,
      draw: (context, width, height) => this.paint(context, width, height),
    });
    box.addEventListener("mousemove", (event) => this.point(this.surface.at(event)[1]));
    box.addEventListener("mouseleave", () => this.onhover(""));
  }

  show(frames) {
    this.lines = linesOf(frames).slice(-MAX_ROWS);
    this.span = frames.length ? [frames[0].time, frames.at(-1).time] : [0, 1];
    this.surface.draw();
  }

  point(y) {
    this.onhover(this.lines[Math.floor(y / ROW)]?.name ?? "");
  }

  paint(context, width, height) {
    const [from, to] = this.span;
    const scale = (width - LABELS) / Math.max(1e-6, to - from);
    context.font = `11px ${this.colours.mono}`;
    context.textBaseline = "middle";
    this.lines.forEach((line, at) => this.line(context, line, at * ROW, from, scale));
    this.axis(context, width, height, to - from);
  }

  line(context, { name, label, parts }, y, from, scale) {
    context.globalAlpha = this.focus && this.focus !== name ? 0.25 : 1;
    context.fillStyle = this.colours.ink;
    context.fillText(label, 0, y + ROW / 2, LABELS - 12);
    for (const { phase, since, until } of parts) {
      const x = LABELS + (since - from) * scale;
      const width = Math.max(1, (until - since) * scale);
      this.part(context, phase, name, x, y + 3, width);
    }
    context.globalAlpha = 1;
  }

  part(context, phase, name, x, y, width) {
    const { colours } = this;
    const tall = ROW - 6;
    if (phase === "waiting") {
      context.fillStyle = colours.cached;
      context.fillRect(x, y + tall / 2 - 1, width, 2);
    } else if (phase === "swapped") {
      context.strokeStyle = colours.request(name);
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, y + 2, Math.max(1, width - 1.5), tall - 4);
    } else {
      context.fillStyle = colours.request(name);
      context.fillRect(x, y, width, tall);
      if (phase === "prefill") stripes(context, x, y, width, tall, colours.paper);
    }
  }

  axis(context, width, height, total) {
    context.font = `11px ${this.colours.sans}`;
    context.fillStyle = this.colours.soft;
    context.fillText(`${seconds(total)} ago`, LABELS, height - 8);
    context.textAlign = "right";
    context.fillText("now", width, height - 8);
    context.textAlign = "left";
  }
}

/** Draws fine upright lines over a part, which tell a prefill from what follows. */
function stripes(context, x, y, width, tall, colour) {
  context.fillStyle = colour;
  for (let at = x + 2; at < x + width; at += 4) context.fillRect(at, y, 1.5, tall);
}

/** Returns what a request does: it prefills until its first token, or while it is behind. */
export function phaseOf(request) {
  if (request.state !== "running") return request.state;
  const behind = request.prompt_tokens + request.tokens - request.computed_tokens > 1;
  return request.tokens === 0 || behind ? "prefill" : "decode";
}

function linesOf(frames) {
  const lines = new Map();
  frames.forEach((frame, at) => {
    const until = frames[at + 1]?.time ?? frame.time;
    for (const request of frame.requests.values()) {
      if (!lines.has(request.n)) lines.set(request.n, { name: request.n, label: nameOf(request), parts: [] });
      extend(lines.get(request.n).parts, phaseOf(request), frame.time, until);
    }
  });
  return [...lines.values()];
}

function extend(parts, phase, since, until) {
  const last = parts.at(-1);
  if (last?.phase === phase && last.until >= since - 1e-9) last.until = until;
  else parts.push({ phase, since, until });
}
