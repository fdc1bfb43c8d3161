// Tokens as the model chose them, shaded by how likely each was, and the alternatives of one.

import { byId, h, percent } from "./dom.js";

/** Shares below which a token is drawn with one more degree of surprise. */
const SHADES = [0.05, 0.2, 0.5, 0.85];
const ID = /^token_id:(\d+)$/;

/** Returns a token from an entry of the API's logprobs, and with it its alternatives. */
export function tokenOf({ token, bytes, logprob, top_logprobs: others = [] }) {
  const id = token.match(ID)?.[1];
  return {
    id: id === undefined ? null : Number(id),
    text: id !== undefined && bytes ? spelled(bytes) : token,
    bytes: bytes ?? [...new TextEncoder().encode(token)],
    logprob,
    top: others.map((other) => tokenOf({ ...other, top_logprobs: [] })),
  };
}

const decoded = (bytes) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));

/** Returns a token's bytes as text, each byte of a part of a character as <0xE2>. */
export function spelled(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; ) {
    const size = [1, 2, 3, 4].find((length) => isCharacter(bytes.slice(at, at + length)));
    text += size ? decoded(bytes.slice(at, at + size)) : `<0x${bytes[at].toString(16).toUpperCase().padStart(2, "0")}>`;
    at += size ?? 1;
  }
  return text;
}

function isCharacter(bytes) {
  try {
    return [...new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes))].length === 1;
  } catch {
    return false;
  }
}

/** Joins tokens to the text that they make; a character may take several. */
export const textOf = (tokens) => decoded(tokens.flatMap((token) => token.bytes));

/** Returns a token's text with what cannot be seen made visible. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (blanks) => "·".repeat(blanks.length));
}

const shadeOf = (logprob) => {
  const share = Math.exp(logprob);
  const at = SHADES.findIndex((limit) => share < limit);
  return at < 0 ? SHADES.length : at;
};

/** Shows the tokens of an answer as they come; arrow keys go from one to the next. */
export class TokenView {
  constructor(element, onchoose) {
    this.element = element;
    this.onchoose = onchoose;
    this.tokens = [];
    element.className = "tokens";
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", "Tokens of the response");
    element.addEventListener("mouseover", (event) => this.preview(event.target));
    element.addEventListener("mouseleave", () => popover.leave());
    element.addEventListener("click", (event) => this.open(event.target));
    element.addEventListener("keydown", (event) => this.move(event));
  }

  show(tokens) {
    if (tokens.length < this.tokens.length || this.tokens[0] !== tokens[0]) {
      this.element.replaceChildren();
    }
    for (let at = this.element.children.length; at < tokens.length; at += 1) {
      this.element.append(spanOf(tokens[at], at));
    }
    this.tokens = [...tokens];
  }

  preview(target) {
    const at = indexOf(target);
    if (at !== null) popover.show(target, this.tokens[at], this.chooser(at));
  }

  open(target) {
    const at = indexOf(target);
    if (at !== null) popover.show(target, this.tokens[at], this.chooser(at), true);
  }

  chooser(at) {
    return this.onchoose && ((alternative) => this.onchoose(at, alternative));
  }

  move(event) {
    const at = indexOf(event.target);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (at === null) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.open(event.target);
    } else if (step) {
      event.preventDefault();
      const next = this.element.children[at + step];
      if (!next) return;
      event.target.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
  }
}

function spanOf(token, at) {
  const name = `${visible(token.text)}, ${percent(Math.exp(token.logprob))}`;
  return h(
    "span",
    {
      class: `token p${shadeOf(token.logprob)}${token.wasChosen ? " chosen" : ""}`,
      role: "button",
      tabindex: at === 0 ? "0" : "-1",
      "aria-haspopup": "dialog",
      "aria-label": name,
      "data-at": at,
    },
    token.text,
  );
}

const indexOf = (target) =>
  target instanceof HTMLElement && target.dataset.at !== undefined ? Number(target.dataset.at) : null;

/** The one list of alternatives, beside the token that it belongs to. */
class Popover {
  constructor() {
    this.owner = null;
    this.isPinned = false;
    this.leaving = 0;
  }

  show(owner, token, choose, pinned = false) {
    clearTimeout(this.leaving);
    if (this.isPinned && !pinned) return;
    this.hide();
    this.owner = owner;
    this.isPinned = pinned;
    owner.setAttribute("aria-expanded", "true");
    const box = this.box();
    box.replaceChildren(...contents(token, choose && ((other) => this.choose(other, choose))));
    box.hidden = false;
    place(box, owner);
    if (pinned) box.querySelector("button:not(:disabled)")?.focus();
  }

  choose(alternative, choose) {
    this.hide();
    choose(alternative);
  }

  /** Hides the list soon, unless the pointer goes to it. */
  leave() {
    if (this.isPinned) return;
    clearTimeout(this.leaving);
    this.leaving = setTimeout(() => this.hide(), 180);
  }

  hide() {
    clearTimeout(this.leaving);
    if (!this.owner) return;
    const box = byId("alternatives");
    const held = box.contains(document.activeElement);
    box.hidden = true;
    this.owner.removeAttribute("aria-expanded");
    if (held) this.owner.focus();
    this.owner = null;
    this.isPinned = false;
  }

  box() {
    const box = byId("alternatives");
    if (!this.isBound) {
      this.isBound = true;
      box.addEventListener("mouseenter", () => clearTimeout(this.leaving));
      box.addEventListener("mouseleave", () => this.leave());
      box.addEventListener("keydown", (event) => walk(event, box, () => this.hide()));
      addEventListener("scroll", () => this.hide(), true);
      addEventListener("pointerdown", (event) => {
        if (!box.contains(event.target)) this.hide();
      });
    }
    return box;
  }
}

export const popover = new Popover();

function contents(token, choose) {
  const others = token.top.length ? token.top : [token];
  const isAmong = others.some((other) => same(other, token));
  const rows = (isAmong ? others : [...others, token]).map((other) => row(other, token, choose));
  const hint = choose ? "Select an alternative to continue from it." : "Most likely tokens at this position.";
  return [h("p", {}, hint), ...rows];
}

const same = (one, other) => one.id === other.id && one.text === other.text;

function row(other, token, choose) {
  const share = Math.exp(other.logprob);
  const isOwn = same(other, token);
  const bar = h("span", { class: "bar" });
  bar.style.width = `${share * 100}%`;
  return h(
    "button",
    {
      type: "button",
      class: "alternative",
      disabled: isOwn || !choose,
      onclick: () => choose(other),
      "aria-label": `${visible(other.text)}, ${percent(share)}${isOwn ? ", chosen" : ""}`,
    },
    bar,
    h("span", { class: "word" }, visible(other.text)),
    h("span", { class: "chance" }, percent(share)),
  );
}

function place(box, owner) {
  const at = owner.getClientRects()[0] ?? owner.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const below = at.bottom + height + 6 < innerHeight;
  box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  box.style.top = `${Math.max(8, below ? at.bottom + 4 : at.top - height - 4)}px`;
}

function walk(event, box, hide) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") {
    event.stopPropagation();
    hide();
  } else if (step) {
    event.preventDefault();
    const buttons = [...box.querySelectorAll("button:not(:disabled)")];
    buttons.at((buttons.indexOf(document.activeElement) + step) % buttons.length)?.focus();
  }
}
