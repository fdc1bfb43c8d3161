// The token of an answer under the pointer, where the answer is shown as text and not as tokens.

import { h } from "./dom.js";
import { popover, textOf } from "./tokens.js";

const DWELL_MS = 300;

/** Shows the alternatives of the token that the pointer rests on. */
export class ProseTokens {
  constructor(element, onchoose) {
    this.element = element;
    this.onchoose = onchoose;
    this.text = "";
    this.tokens = [];
    this.resting = 0;
    this.marker = h("span", { class: "marker", "aria-hidden": "true" });
    element.addEventListener("mousemove", (event) => this.follow(event));
    element.addEventListener("mouseleave", () => this.leave());
  }

  show(text, tokens) {
    this.text = text;
    this.tokens = tokens;
  }

  follow({ clientX, clientY, buttons }) {
    clearTimeout(this.resting);
    if (popover.owner === this.marker && within(this.marker, clientX, clientY)) return;
    if (popover.owner === this.marker) popover.leave();
    if (!buttons) this.resting = setTimeout(() => this.preview(clientX, clientY), DWELL_MS);
  }

  leave() {
    clearTimeout(this.resting);
    popover.leave();
  }

  preview(x, y) {
    const found = characterAt(x, y);
    if (!found || !this.element.contains(found.node)) return;
    const place = placeInText(this.element, found, this.text);
    const token = place === null ? null : tokenAt(this.tokens, this.text, place);
    if (!token) return;
    this.mark(found, token.first - place, token.last - place, x, y);
    popover.show(this.marker, this.tokens[token.index], (other) => this.onchoose(token.index, other));
  }

  /** Puts the marker on a token's characters, given from the one that is pointed at. */
  mark({ node, offset }, before, after, x, y) {
    const range = document.createRange();
    range.setStart(node, Math.max(0, offset + before));
    range.setEnd(node, Math.min(node.length, offset + after));
    const rects = [...range.getClientRects()];
    const rect = rects.find((one) => has(one, x, y)) ?? range.getBoundingClientRect();
    const frame = this.element.parentElement.getBoundingClientRect();
    const { style } = this.marker;
    style.left = `${rect.left - frame.left}px`;
    style.top = `${rect.top - frame.top}px`;
    style.width = `${rect.width}px`;
    style.height = `${rect.height}px`;
  }
}

const has = ({ left, right, top, bottom }, x, y) => x >= left && x <= right && y >= top && y <= bottom;
const within = (element, x, y) => has(element.getBoundingClientRect(), x, y);

/** Returns the character at a point of the window, as a text node and an offset; null without one. */
function characterAt(x, y) {
  const [node, caret] = caretAt(x, y);
  if (node?.nodeType !== Node.TEXT_NODE) return null;
  for (const offset of [caret - 1, caret]) {
    if (offset < 0 || offset >= node.length) continue;
    const range = document.createRange();
    range.setStart(node, offset);
    range.setEnd(node, offset + 1);
    if ([...range.getClientRects()].some((rect) => has(rect, x, y))) return { node, offset };
  }
  return null;
}

function caretAt(x, y) {
  const caret = document.caretPositionFromPoint?.(x, y);
  if (caret) return [caret.offsetNode, caret.offset];
  const range = document.caretRangeFromPoint?.(x, y);
  return range ? [range.startContainer, range.startOffset] : [null, 0];
}

/**
 * Returns the place in a text of a character of its markdown's elements; null where there is none.
 * A line of a text node stands in the text as it is, after those before it.
 */
export function placeInText(root, { node, offset }, text) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  let from = 0;
  for (let one = walker.nextNode(); one; one = walker.nextNode()) {
    if (one.parentElement.closest(".code-head")) continue;
    let begin = 0;
    for (const line of one.data.split("\n")) {
      const at = text.indexOf(line, from);
      const end = begin + line.length;
      if (one === node && offset >= begin && offset < end) return at < 0 ? null : at + offset - begin;
      if (at >= 0) from = at + line.length;
      begin = end + 1;
    }
  }
  return null;
}

/** Returns the token that makes a place of the text, and the places where it begins and ends. */
function tokenAt(tokens, text, place) {
  const start = textOf(tokens).indexOf(text);
  if (start < 0) return null;
  const encoder = new TextEncoder();
  const bytes = encoder.encode(textOf(tokens).slice(0, start + place)).length;
  let end = 0;
  const index = tokens.findIndex((token) => (end += token.bytes.length) > bytes);
  if (index < 0) return null;
  const first = textOf(tokens.slice(0, index)).length - start;
  return { index, first, last: first + Math.max(1, tokens[index].text.length) };
}
