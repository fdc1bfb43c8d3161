// The chat view: sends what is written, shows what comes, and can stop, repeat, edit and branch.

import { ApiError } from "./api.js";
import { Conversation, shown } from "./conversation.js";
import { announce, byId, eachFrame, h, keep, kept } from "./dom.js";
import { AnswerMessage, UserMessage } from "./message.js";
import { Settings } from "./settings.js";
import { showPrompt } from "./prompt.js";
import { popover, textOf, tokenOf } from "./tokens.js";

const NUM_ALTERNATIVES = 5;
const NEAR_END_PX = 90;
/** A repetition that ends an answer, as in `octavo chat` (octavo/api/repetition_detection.py). */
const LOOP = { max_pattern_size: 256, min_pattern_size: 16, min_count: 5 };
const SUGGESTIONS = [
  "Write a haiku about memory.",
  "Explain continuous batching to a student.",
  "Sort a list of words in Python.",
];

export class ChatView {
  constructor(api, model) {
    this.api = api;
    this.model = model;
    this.settings = new Settings();
    this.conversation = new Conversation(kept("conversation", []));
    this.views = new Map();
    this.running = null;
    this.transcript = byId("transcript");
    this.draft = byId("draft");
    this.bind();
    this.show();
  }

  bind() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.draft.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("stop-button").addEventListener("click", () => this.stop());
    byId("new-button").addEventListener("click", () => this.begin());
    byId("prompt-button").addEventListener("click", () => this.prompt());
    byId("settings-button").addEventListener("click", () => this.toggleSettings());
    byId("settings-close").addEventListener("click", () => this.toggleSettings());
  }

  focus() {
    this.draft.focus({ preventScroll: true });
  }

  toggleSettings() {
    const isOpen = byId("settings").classList.toggle("open");
    const button = byId("settings-button");
    button.setAttribute("aria-expanded", String(isOpen));
    (isOpen ? byId("system-prompt") : button).focus();
  }

  // -- what the user does --

  send() {
    const text = this.draft.value.trim();
    if (!text || this.running) return;
    this.draft.value = "";
    this.run(this.conversation.ask(text));
  }

  edit(turn, text) {
    this.stop();
    this.run(this.conversation.edit(turn, text));
  }

  retry(turn) {
    this.stop();
    this.run(this.conversation.again(turn));
  }

  /** Goes on from an alternative: keeps the tokens before it, and lets the model write the rest. */
  goOn(turn, at, alternative) {
    const source = shown(turn);
    const { top } = source.tokens[at];
    const chosen = { ...alternative, top, wasChosen: true };
    this.stop();
    const kept = [...source.tokens.slice(0, at), chosen];
    this.conversation.again(turn, kept, source);
    this.run(turn, { kept, point: forkPoint(source, at), then: alternative.id });
  }

  showVersion(turn, at) {
    this.stop();
    turn.at = at;
    this.views.get(turn).update();
    this.save();
  }

  stop() {
    this.running?.abort();
  }

  begin() {
    this.stop();
    this.conversation = new Conversation();
    this.save();
    this.show();
    this.focus();
    announce("New conversation");
  }

  prompt() {
    const draft = this.draft.value.trim();
    const messages = this.conversation.messages(this.settings.system.value);
    if (draft) messages.push({ role: "user", content: draft });
    showPrompt(this.api, this.model.name, messages);
  }

  // -- an answer --

  async run(turn, branch = null) {
    const version = shown(turn);
    const stopper = new AbortController();
    this.running = stopper;
    version.isRunning = true;
    this.show();
    this.scrollToEnd();
    announce("Generating a response");
    const update = eachFrame(() => this.follow(turn));
    const watch = new Stopwatch();
    try {
      for await (const event of this.chunks(turn, branch, stopper.signal)) {
        watch.take(event.payload);
        take(event.payload, version, watch);
        update();
      }
    } catch (error) {
      if (error.name !== "AbortError") version.fault = faultOf(error);
      else version.finishReason = "abort";
    }
    version.isRunning = false;
    version.facts = watch.facts(version);
    if (this.running === stopper) this.running = null;
    this.show();
    this.save();
    announce(version.fault || version.text || "No response");
  }

  /** Yields the events of an answer; a branch is one that goes on from a beginning. */
  async *chunks(turn, branch, signal) {
    const options = { method: "POST", signal };
    const body = {
      stream: true,
      stream_options: { include_usage: true },
      repetition_detection: LOOP,
      ...this.settings.chosen(),
    };
    const names = { return_tokens_as_token_ids: true };
    if (branch?.point && branch.then !== null) {
      const fork = { ...body, ...names, keep: branch.point.keep, then: [branch.then] };
      try {
        yield* this.api.events(`v1/requests/${branch.point.id}/fork`, { ...options, body: fork });
        return;
      } catch (error) {
        if (error.status !== 404) throw error; // It ended too long ago, or came from elsewhere.
      }
    }
    body.model = this.model.name;
    body.messages = this.conversation.messages(this.settings.system.value, turn);
    if (this.settings.tokens.checked) {
      Object.assign(body, names, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
    }
    if (branch) {
      body.messages.push({ role: "assistant", content: textOf(branch.kept) });
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
    yield* this.api.events("v1/chat/completions", { ...options, body });
  }

  // -- what is seen --

  /** Makes the page's messages those of the conversation; what is there already stays. */
  show() {
    const turns = this.conversation.turns;
    const actions = {
      edit: (turn, text) => this.edit(turn, text),
      retry: (turn) => this.retry(turn),
      goOn: (turn, at, other) => this.goOn(turn, at, other),
      show: (turn, at) => this.showVersion(turn, at),
    };
    const views = new Map();
    for (const turn of turns) {
      const Kind = turn.role === "user" ? UserMessage : AnswerMessage;
      views.set(turn, this.views.get(turn) ?? new Kind(turn, actions));
      views.get(turn).update();
    }
    this.views = views;
    const elements = turns.length ? [...views.values()].map((view) => view.element) : [this.opening()];
    for (const old of [...this.transcript.children]) if (!elements.includes(old)) old.remove();
    elements.forEach((element, at) => {
      if (this.transcript.children[at] !== element) this.transcript.append(element);
    });
    byId("stop-button").hidden = !this.running;
    byId("send-button").hidden = Boolean(this.running);
  }

  opening() {
    const say = (text) => () => {
      this.draft.value = text;
      this.send();
    };
    const items = SUGGESTIONS.map((text) =>
      h("li", {}, h("button", { type: "button", onclick: say(text) }, text)),
    );
    return h(
      "div",
      { class: "opening" },
      h("h2", {}, "Start a conversation"),
      h("p", {}, "Select Tokens below a response and point at a token to see its alternatives."),
      h("ul", { class: "suggestions" }, ...items),
    );
  }

  follow(turn) {
    const isNear = this.distanceToEnd() < NEAR_END_PX;
    this.views.get(turn)?.update();
    if (isNear) this.scrollToEnd();
  }

  distanceToEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.transcript;
    return scrollHeight - scrollTop - clientHeight;
  }

  scrollToEnd() {
    this.transcript.scrollTop = this.transcript.scrollHeight;
  }

  save() {
    popover.hide();
    keep("conversation", this.conversation.saved());
  }
}

/** Returns the request that drew a token, and how many of its own tokens came before. */
function forkPoint(version, at) {
  let from = version;
  while (from && at < from.numGiven) from = from.source;
  return from?.id ? { id: from.id, keep: at - from.numGiven } : null;
}

/** Adds what an event brings to the version that it belongs to. */
function take(payload, version, watch) {
  version.id ||= payload.id;
  if (payload.usage) watch.usage = payload.usage;
  for (const choice of payload.choices ?? []) {
    const delta = choice.delta ?? {};
    version.text += delta.content ?? "";
    version.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    version.tokens.push(...(choice.logprobs?.content ?? []).map(tokenOf));
    version.finishReason = choice.finish_reason ?? version.finishReason;
  }
}

/** Times an answer as its reader sees it. */
class Stopwatch {
  constructor() {
    this.started = performance.now();
    this.first = null;
    this.latest = null;
    this.usage = null;
  }

  take(payload) {
    const brings = (payload.choices ?? []).some(({ delta }) => delta?.content || delta?.reasoning_content);
    if (!brings) return;
    this.latest = performance.now();
    this.first ??= this.latest;
  }

  facts(version) {
    if (this.first === null) return null;
    const tokens = this.usage?.completion_tokens ?? version.tokens.length;
    const seconds = (this.latest - this.first) / 1000;
    return {
      tokens,
      rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      first: (this.first - this.started) / 1000,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
    };
  }
}

function faultOf(error) {
  if (error instanceof ApiError) return error.message;
  if (error instanceof TypeError) return "The server cannot be reached. Is it still running?";
  return String(error.message ?? error);
}
