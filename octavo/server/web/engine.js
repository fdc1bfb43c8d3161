// The engine view: one frame at a time, in all panes, and one request that all of them point out.

import { BlockMap } from "./blockmap.js";
import { Colours } from "./canvas.js";
import { announce, byId, count, eachFrame, h, percent, seconds, showBanner } from "./dom.js";
import { LiveSource, RecordedSource } from "./feed.js";
import { Player } from "./player.js";
import { RequestList, nameOf } from "./requests.js";
import { StepStrip } from "./strip.js";
import { Timelines } from "./timelines.js";

const NUM_FRAMES = 240;
const RATE_SPAN_S = 2;
const LEGEND = [
  ["free", "free"],
  ["cached", "cached"],
  ["held", "in use"],
  ["shared", "shared"],
  ["swapped", "in host memory"],
];

export class EngineView {
  constructor(api, model) {
    this.api = api;
    this.model = model;
    this.colours = new Colours();
    this.colours.onchange = () => this.redraw();
    this.maps = [];
    this.frame = null;
    this.focus = "";
    const onhover = (name) => this.point(name);
    this.list = new RequestList(byId("queues"), this.colours, { onhover });
    this.lines = new Timelines(byId("timelines"), this.colours, { onhover });
    this.strip = new StepStrip(byId("strip"), this.colours, {
      onhover: (text) => {
        byId("strip-readout").textContent = text;
      },
    });
    this.player = new Player(byId("player"), { onmove: (at) => this.move(at) });
    this.figures = new Figures(byId("figures"));
    this.redraw = eachFrame(() => this.draw());
    byId("map-legend").append(...LEGEND.map(([kind, text]) =>
      h("li", {}, h("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text)));
    this.use(new LiveSource(api, model));
  }

  use(source) {
    this.source?.stop();
    this.source = source;
    this.frame = null;
    source.onstate = (text) => {
      if (!byId("engine").hidden) showBanner(text);
    };
    this.player.use(source);
  }

  /** Shows the recording that this server has, instead of an engine. */
  showRecording() {
    this.use(new RecordedSource(this.api));
  }

  enter() {
    this.isShown = true;
    this.source.start();
    this.redraw();
  }

  leave() {
    this.isShown = false;
    this.source.stop();
    if (!this.source.isRecording) showBanner("");
  }

  modelChanged() {
    if (this.source.isRecording) return;
    this.use(new LiveSource(this.api, this.model));
    if (this.isShown) this.enter();
  }

  press(event) {
    const isControl = /^(BUTTON|A|SUMMARY)$/.test(event.target.tagName);
    if (event.key === " " && !isControl) this.player.toggle();
    else if (event.key === ",") this.player.step(-1);
    else if (event.key === ".") this.player.step(1);
    else return;
    event.preventDefault();
    announce(`${byId("strip-readout").textContent}`);
  }

  /** Shows the frame at a place once it is there, unless the player has gone on to another one. */
  async move(at) {
    const { source } = this;
    const isLate = () => source !== this.source || at !== this.player.at;
    byId("engine").ariaBusy = String(!source.frame(at));
    try {
      await source.reach(at, NUM_FRAMES);
    } catch (error) {
      if (!isLate()) byId("engine").ariaBusy = "false";
      showBanner(error.message);
      return;
    }
    if (isLate()) return;
    byId("engine").ariaBusy = "false";
    this.frame = source.frame(at) ?? this.frame;
    this.redraw();
  }

  draw() {
    if (!this.frame || !this.isShown) return;
    const frames = this.source.before(this.player.at, NUM_FRAMES);
    for (const frame of frames) this.colours.assign([...frame.requests.keys()]);
    this.figures.show(this.frame, frames);
    this.drawMaps();
    this.list.show(this.frame);
    this.list.focus = this.focus;
    this.strip.show(frames.flatMap((frame) => frame.steps));
    this.lines.show(frames);
    byId("queue-summary").textContent = this.frame.queue.waits_for
      ? `first request is waiting: ${this.frame.queue.waits_for}`
      : "";
  }

  drawMaps() {
    const { groups, blockSize } = this.frame;
    if (this.maps.length !== groups.length) {
      this.maps = groups.map((group, at) => new BlockMap(this.colours, {
        title: groups.length > 1 ? `KV blocks of cache group ${at}` : "KV blocks",
        onhover: (name, text) => this.pointBlock(name, text),
      }));
      byId("maps").replaceChildren(...this.maps.map((map) => map.element));
    }
    groups.forEach((group, at) => {
      this.maps[at].focus = this.focus;
      this.maps[at].show(group, groups.length > 1 ? titleOf(group) : "");
    });
    byId("map-summary").textContent = summaryOf(groups, blockSize);
  }

  point(name) {
    if (name === this.focus) return;
    this.focus = name;
    this.lines.focus = name;
    for (const map of this.maps) map.cursor = -1;
    byId("map-hover").textContent = name ? this.describe(name) : "\u00a0";
    this.redraw();
  }

  pointBlock(name, text) {
    this.focus = this.lines.focus = name;
    byId("map-hover").textContent = text ? [text, this.describe(name)].filter(Boolean).join(" · ") : "\u00a0";
    this.redraw();
  }

  describe(name) {
    const request = this.frame?.requests.get(name);
    if (!request) return "";
    const { prompt_tokens: prompt, tokens, blocks, state } = request;
    return `${nameOf(request)}, ${state}: ${count(prompt)} prompt tokens, ${count(tokens)} generated, ${count(blocks)} blocks`;
  }
}

const titleOf = ({ number, window: size }) =>
  `Group ${number}: ${size ? `window of ${count(size)} tokens` : "full attention"}`;

function summaryOf(groups, blockSize) {
  const all = groups.reduce((sum, group) => sum + group.numBlocks, 0);
  const used = groups.reduce((sum, { counts }) => sum + counts.held + counts.shared, 0);
  const hidden = groups.some((group) => group.states.length < group.numBlocks);
  const part = hidden ? "; only the first ones are shown" : "";
  return `${count(used)} of ${count(all)} in use, ${blockSize} tokens each${part}`;
}

/** The row of figures above the panes. */
class Figures {
  constructor(box) {
    this.values = {};
    for (const name of ["Tokens/s", "Running", "Waiting", "Swapped", "KV held", "Prefix hits", "Step", "Preemptions"]) {
      this.values[name] = h("dd", {}, "–");
      box.append(h("dl", { class: "figure" }, h("dt", {}, name), this.values[name]));
    }
  }

  show(frame, frames) {
    const { queue, counters, groups } = frame;
    const held = groups.map(({ counts, numBlocks }) => (counts.held + counts.shared) / Math.max(1, numBlocks));
    const rate = rateOf(frame, frames);
    const steps = frames.slice(-20).flatMap((one) => one.steps);
    const ms = steps.reduce((sum, mark) => sum + mark.ms, 0) / Math.max(1, steps.length);
    this.set("Tokens/s", rate === null ? "–" : count(rate));
    this.set("Running", count(queue.running));
    this.set("Waiting", count(queue.waiting));
    this.set("Swapped", count(queue.swapped));
    this.set("KV held", percent(Math.max(0, ...held)));
    this.set("Prefix hits", counters.prefix_query_tokens
      ? percent(counters.prefix_hit_tokens / counters.prefix_query_tokens) : "–");
    this.set("Step", steps.length ? seconds(ms / 1000) : "–");
    this.set("Preemptions", count(counters.num_preemptions));
  }

  set(name, text) {
    const element = this.values[name];
    if (element.textContent !== text) element.textContent = text;
  }
}

/** Returns generated tokens a second over the last RATE_SPAN_S; null where that is not known. */
function rateOf(frame, frames) {
  const first = frames.find((one) => one.time >= frame.time - RATE_SPAN_S) ?? frames[0];
  const span = frame.time - (first?.time ?? frame.time);
  if (span <= 0) return null;
  return (frame.counters.generation_tokens - first.counters.generation_tokens) / span;
}
