// Which frame is looked at: follows a live engine, or goes through what is there at a chosen pace.

import { h } from "./dom.js";

const PACES = [
  ["2 a second", 2, "steps"],
  ["5 a second", 5, "steps"],
  ["20 a second", 20, "steps"],
  ["as it was", 1, "time"],
  ["4 times as fast", 4, "time"],
];
const LONGEST_PAUSE_S = 2;

export class Player {
  constructor(box, { onmove }) {
    this.box = box;
    this.onmove = onmove;
    this.source = null;
    this.at = 0;
    this.plays = true;
    this.timer = 0;
    this.toggleButton = button("Pause", () => this.toggle());
    this.back = button("‹ Step", () => this.step(-1));
    this.forward = button("Step ›", () => this.step(1));
    this.slider = h("input", { type: "range", min: 0, max: 0, step: 1, "aria-label": "Position" });
    this.place = h("output", { class: "place" });
    this.pace = h("select", { "aria-label": "Speed" }, ...PACES.map(([name], at) => h("option", { value: at }, name)));
    this.pace.value = "1";
    this.slider.addEventListener("input", () => this.go(this.source.first + Number(this.slider.value), false));
    box.append(this.toggleButton, this.back, this.forward, this.slider, this.place, this.pace);
  }

  use(source) {
    this.source = source;
    this.plays = true;
    this.pace.hidden = !source.isRecording;
    source.onframe = () => this.grown();
    this.at = source.first;
    this.update();
  }

  /** Looks at the newest frame of a live engine; a recording starts once it has frames. */
  grown() {
    if (!this.source.isRecording && this.plays) this.go(this.source.end - 1, true);
    else if (this.source.isRecording && !this.timer && this.plays) this.tick();
    if (this.at < this.source.first) this.go(this.source.first, false);
    this.update();
  }

  toggle() {
    this.plays = !this.plays;
    clearTimeout(this.timer);
    this.timer = 0;
    if (this.plays && this.source.isRecording && this.at >= this.source.end - 1) this.at = 0;
    if (this.plays) this.grown();
    this.update();
  }

  step(by) {
    this.go(this.at + by, false);
  }

  async go(index, plays) {
    if (!plays) {
      clearTimeout(this.timer);
      this.timer = 0;
      this.plays = false;
    }
    const last = this.source.end - 1;
    this.at = Math.max(this.source.first, Math.min(last, index));
    this.update();
    await this.onmove(this.at);
  }

  /** Shows one frame of a recording after the other. */
  async tick() {
    this.timer = -1;
    await this.go(this.at, true);
    if (!this.plays) return;
    this.timer = setTimeout(() => this.next(), 1000 * this.pauseS());
  }

  async next() {
    if (this.at >= this.source.end - 1) {
      this.timer = 0;
      if (this.source.about.is_complete) this.plays = false;
      this.update();
      return;
    }
    this.at += 1;
    await this.tick();
  }

  pauseS() {
    const [, rate, kind] = PACES[Number(this.pace.value)];
    if (kind === "steps") return 1 / rate;
    const now = this.source.frame(this.at);
    const then = this.source.frame(this.at + 1);
    if (!now || !then) return 0.1;
    return Math.min(LONGEST_PAUSE_S, Math.max(0.02, (then.time - now.time) / rate));
  }

  update() {
    const { source } = this;
    const numFrames = source.end - source.first;
    this.slider.max = String(Math.max(0, numFrames - 1));
    this.slider.value = String(this.at - source.first);
    this.slider.disabled = this.back.disabled = this.forward.disabled = numFrames < 2;
    this.toggleButton.textContent = this.plays ? "Pause" : source.isRecording ? "Play" : "Live";
    this.toggleButton.classList.toggle("primary", !this.plays);
    this.place.textContent = this.placeText(numFrames);
  }

  placeText(numFrames) {
    if (!numFrames) return "";
    if (this.source.isRecording) return `${this.at + 1} of ${this.source.end}`;
    if (this.plays) return "live";
    const now = this.source.frame(this.source.end - 1);
    const then = this.source.frame(this.at);
    return now && then ? `${(now.time - then.time).toFixed(1)} s ago` : "";
  }
}

const button = (text, onclick) => h("button", { type: "button", onclick }, text);
