// One turn on the page: what was said, what can be done with it, how fast it came.

import { count, h, seconds } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { ProseTokens } from "./prose.js";
import { TokenView } from "./tokens.js";
import { shown } from "./conversation.js";

const ENDS = {
  length: "truncated at the maximum length",
  abort: "stopped",
  repetition: "stopped because it repeats itself",
  content_filter: "filtered",
  error: "failed",
};

/** Shows a turn of the user, with a button that edits it. */
export class UserMessage {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.body = h("div", { class: "message-body" }, turn.text);
    this.foot = h(
      "div",
      { class: "message-foot" },
      button("Edit", () => this.edit()),
    );
    this.element = h("article", { class: "message user", "aria-label": "You" }, this.body, this.foot);
  }

  edit() {
    const box = h("textarea", { "aria-label": "Edited message" });
    box.value = this.turn.text;
    const done = () => this.element.replaceChildren(this.body, this.foot);
    const send = () => {
      const text = box.value.trim();
      done();
      if (text) this.actions.edit(this.turn, text);
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        done();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    const row = h("div", { class: "edit-row" }, button("Cancel", done), button("Send", send, "primary"));
    this.element.replaceChildren(h("div", { class: "edit-box" }, box, row));
    box.focus();
  }

  update() {}
}

/** Shows an answer, as markdown or as tokens. */
export class AnswerMessage {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.asTokens = false;
    this.version = null;
    this.prose = h("div", { class: "prose" });
    this.tokenBox = h("div");
    this.proseTokens = new ProseTokens(this.prose, (at, other) => this.actions.goOn(this.turn, at, other));
    this.thinking = h("details", { class: "thinking", hidden: true }, h("summary", {}, "Reasoning"), h("div"));
    this.fault = h("p", { class: "fault", role: "alert", hidden: true });
    this.body = h("div", { class: "message-body" }, this.thinking, this.prose,
      this.tokenBox, this.proseTokens.marker, this.fault);
    this.foot = h("div", { class: "message-foot" });
    this.element = h("article", { class: "message assistant", "aria-label": "Response" }, this.body, this.foot);
    this.update();
  }

  update() {
    const version = shown(this.turn);
    if (version !== this.version) this.begin(version);
    if (this.asTokens) this.tokenView.show(version.tokens);
    else this.markdown.show(version.text);
    this.proseTokens.show(version.text, version.tokens);
    this.prose.hidden = this.asTokens;
    this.tokenBox.hidden = !this.asTokens;
    this.thinking.hidden = !version.reasoning;
    this.thinking.lastChild.textContent = version.reasoning;
    this.body.classList.toggle("waiting", version.isRunning && !version.text);
    this.fault.hidden = !version.fault;
    this.fault.textContent = version.fault;
    this.updateFoot(version);
  }

  begin(version) {
    this.version = version;
    this.prose.replaceChildren();
    this.tokenBox.replaceChildren();
    this.markdown = new MarkdownView(this.prose);
    this.tokenView = new TokenView(this.tokenBox, (at, other) => this.actions.goOn(this.turn, at, other));
    this.footState = "";
  }

  /** Makes the foot again only where it has changed: a focused button stays the same element. */
  updateFoot(version) {
    const { versions, at } = this.turn;
    const hasTokens = version.tokens.length > 0;
    const state = [version.isRunning, hasTokens, this.asTokens, versions.length, at, version.facts?.rate].join();
    if (state === this.footState) return;
    this.footState = state;
    const parts = [];
    if (versions.length > 1) parts.push(this.versionButtons());
    if (!version.isRunning) {
      parts.push(button("Retry", () => this.actions.retry(this.turn)));
      parts.push(button("Copy", () => navigator.clipboard?.writeText(version.text)));
    }
    if (hasTokens) parts.push(this.tokenButton());
    if (!version.isRunning) parts.push(h("span", { class: "facts" }, factsOf(version)));
    const focused = this.foot.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.foot.replaceChildren(...parts);
    if (focused) [...this.foot.querySelectorAll("button")].find((b) => b.textContent === focused)?.focus();
  }

  tokenButton() {
    const toggle = button("Tokens", () => {
      this.asTokens = !this.asTokens;
      this.footState = "";
      this.update();
    });
    toggle.setAttribute("aria-pressed", String(this.asTokens));
    if (this.asTokens) toggle.textContent = "Text";
    return toggle;
  }

  versionButtons() {
    const { versions, at } = this.turn;
    const go = (step) => () => this.actions.show(this.turn, at + step);
    const back = button("‹", go(-1));
    const forward = button("›", go(1));
    back.setAttribute("aria-label", "Previous version");
    forward.setAttribute("aria-label", "Next version");
    back.disabled = at === 0;
    forward.disabled = at === versions.length - 1;
    return h("span", { class: "versions" }, back, `${at + 1} of ${versions.length}`, forward);
  }
}

function button(text, onclick, kind = "quiet") {
  return h("button", { type: "button", class: kind, onclick }, text);
}

/** Returns what is known of how an answer came: its end, its tokens, its speed. */
function factsOf({ finishReason, facts }) {
  const parts = [];
  if (ENDS[finishReason]) parts.push(ENDS[finishReason]);
  if (facts?.tokens) parts.push(`${count(facts.tokens)} tokens`);
  if (facts?.rate) parts.push(`${facts.rate >= 9.95 ? count(facts.rate) : facts.rate.toFixed(1)} tokens/s`);
  if (facts?.first) parts.push(`first token ${seconds(facts.first)}`);
  if (facts?.cached) parts.push(`${count(facts.cached)} of ${count(facts.prompt)} prompt tokens cached`);
  return parts.join(" · ");
}
