// The system prompt and the sampling controls, which are made from what the server says it takes.

import { byId, h, keep, kept } from "./dom.js";

const PATH = "/v1/chat/completions";
/** Fields that stand before the others, in this order. */
const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
/** Fields that the page sets itself, or that change the answer's form and not its text. */
const OWN = new Set(
  ("model messages n stream stream_options logprobs top_logprobs prompt_logprobs prompt_logprob_start " +
    "return_token_ids return_tokens_as_token_ids return_prompt_text timings echo user request_id " +
    "cache_salt use_beam_search add_generation_prompt continue_final_message add_special_tokens " +
    "chat_template response_format tool_choice function_call truncate_prompt_tokens").split(" "),
);
const KINDS = { integer: "whole", number: "number", boolean: "flag", string: "text" };
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
    this.given = [[], {}];
  }

  /** Makes a control for each field of a model. */
  use(fields, features = {}) {
    this.given = [fields, features];
    this.fields = fields.map(normal).filter((field) => field && !(field.name === "priority" && !features.priority));
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
    this.use(...this.given);
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
    return h("label", { class: `field${field.type === "text" && !field.choices ? " wide" : ""}` }, ...parts);
  }
}

/** Returns a field as the controls need it; null for one that a form cannot or need not ask for. */
function normal(field) {
  const kinds = [field.type].flat();
  const type = KINDS[kinds.find((kind) => kind in KINDS)];
  const isLone = !field.needs || Object.keys(field.needs).every((name) => !OWN.has(name));
  const isChats = !field.paths || field.paths.includes(PATH);
  if (!type || OWN.has(field.name) || !isChats || !isLone || field.inert || field.same_as) return null;
  const isOpen = type === "number" && field.max > 1e9;
  return { ...field, type, min: field.min ?? field.above, max: isOpen ? undefined : field.max };
}

const isSlider = ({ type, min, max }) =>
  type === "number" && Number.isFinite(min) && Number.isFinite(max) && max - min <= MAX_SLIDER;

function inputOf(field, value) {
  const holder = field.default === null || field.default === undefined ? "" : String(field.default);
  const choices = field.type === "flag" ? ["true", "false"] : field.choices;
  if (choices) {
    const input = h("select", {}, h("option", { value: "" }, holder ? `default (${holder})` : "default"),
      ...choices.map((choice) => h("option", { value: choice }, choice)));
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
    "aria-label": `${field.name.replaceAll("_", " ")}, slider`, tabindex: "-1" });
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
