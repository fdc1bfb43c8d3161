// The system prompt and the sampling controls, which are made from what the server says it takes.

import { byId, h, keep, kept } from "./dom.js";

/** Fields that stand before the others, in this order. */
const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
/** Fields that the page sets itself. */
const OWN = new Set(["n", "logprobs", "top_logprobs", "stream", "prompt_logprobs", "messages", "model"]);
const KINDS = {
  integer: "whole", int: "whole", whole: "whole", number: "number", float: "number",
  boolean: "flag", bool: "flag", flag: "flag", string: "text", text: "text",
};
/** Largest range that a slider covers sensibly. */
const MAX_SLIDER = 4;

export class Settings {
  constructor() {
    this.values = kept("sampling", {});
    this.system = byId("system-prompt");
    this.system.value = kept("system", "");
    this.system.addEventListener("input", () => keep("system", this.system.value));
    this.tokens = byId("wants-tokens");
    this.tokens.checked = kept("tokens", true);
    this.tokens.addEventListener("change", () => keep("tokens", this.tokens.checked));
    byId("reset-sampling").addEventListener("click", () => this.reset());
    this.fields = [];
  }

  /** Makes a control for each field of a model. */
  use(fields) {
    this.fields = fields.map(normal).filter((field) => field && !OWN.has(field.name));
    const rank = ({ name }) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
    const sorted = [...this.fields].sort((a, b) => rank(a) - rank(b));
    const first = sorted.filter((field) => rank(field) < FIRST.length);
    const more = sorted.filter((field) => rank(field) === FIRST.length);
    const controls = first.map((field) => this.control(field));
    if (more.length) {
      controls.push(h("details", {}, h("summary", {}, "More"), ...more.map((field) => this.control(field))));
    }
    byId("sampling").replaceChildren(...controls);
  }

  /** Returns the fields of a request that differ from the model's defaults. */
  chosen() {
    const known = new Set(this.fields.map((field) => field.name));
    return Object.fromEntries(Object.entries(this.values).filter(([name]) => known.has(name)));
  }

  reset() {
    this.values = {};
    keep("sampling", null);
    this.use(this.fields);
  }

  set(name, value) {
    if (value === null) delete this.values[name];
    else this.values[name] = value;
    keep("sampling", this.values);
  }

  control(field) {
    const input = inputOf(field, this.values[field.name]);
    const parts = [h("span", { class: "field-name" }, field.name.replaceAll("_", " ")), input];
    const slider = isSlider(field) ? sliderOf(field, this.values[field.name]) : null;
    const take = () => {
      const value = valueOf(field, input);
      if (value !== undefined) this.set(field.name, value);
    };
    input.addEventListener("input", () => {
      take();
      if (slider) slider.value = input.value === "" ? (field.default ?? field.min) : input.value;
    });
    slider?.addEventListener("input", () => {
      input.value = slider.value;
      take();
    });
    if (slider) parts.push(slider);
    if (field.help) parts.push(h("span", { class: "help" }, field.help));
    return h("label", { class: `field${field.type === "text" ? " wide" : ""}` }, ...parts);
  }
}

/** Returns a field as the controls need it; null for one that a form cannot ask for. */
function normal(field) {
  const type = KINDS[field.type];
  if (!type) return null;
  return { ...field, type };
}

const isSlider = ({ type, min, max }) =>
  type === "number" && Number.isFinite(min) && Number.isFinite(max) && max - min <= MAX_SLIDER;

function inputOf(field, value) {
  const holder = field.default === null || field.default === undefined ? "" : String(field.default);
  if (field.type === "flag") {
    const input = h("select", {}, h("option", { value: "" }, holder ? `default (${holder})` : "default"),
      h("option", { value: "true" }, "yes"), h("option", { value: "false" }, "no"));
    input.value = value === undefined ? "" : String(value);
    return input;
  }
  const numeric = field.type !== "text";
  const input = h("input", {
    type: numeric ? "number" : "text",
    min: numeric ? field.min : null,
    max: numeric ? field.max : null,
    step: numeric ? (field.type === "whole" ? 1 : "any") : null,
    placeholder: holder || "default",
    inputmode: numeric ? "decimal" : null,
  });
  input.value = value ?? "";
  return input;
}

const sliderOf = (field, value) => {
  const slider = h("input", { type: "range", min: field.min, max: field.max, step: 0.01,
    "aria-label": `${field.name}, slider`, tabindex: "-1" });
  slider.value = value ?? field.default ?? field.min;
  return slider;
};

/** Returns what an input holds: null for the default, undefined for what is not allowed. */
function valueOf(field, input) {
  if (input.value === "") return input.validity?.badInput ? undefined : null;
  if (!input.checkValidity()) return undefined;
  if (field.type === "flag") return input.value === "true";
  return field.type === "text" ? input.value : Number(input.value);
}
