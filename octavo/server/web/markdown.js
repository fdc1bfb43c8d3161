// Markdown as models write it, made into elements. No HTML passes: every text becomes a text node.
// Covers headings, paragraphs, lists, quotes, rules, tables, fenced code, emphasis, code and links.

import { h } from "./dom.js";
import { highlighted } from "./highlight.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 12;

/** Shows a text that grows: elements of parts that have not changed stay as they are. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.parts = [];
  }

  show(text) {
    const sources = split(text);
    let same = 0;
    while (same < sources.length && this.parts[same] === sources[same]) same += 1;
    while (this.element.children.length > same) this.element.lastChild.remove();
    for (const source of sources.slice(same)) {
      this.element.append(h("div", { class: "part" }, ...blocks(source.split("\n"), 0)));
    }
    this.parts = sources;
  }
}

/** Cuts a text at its blank lines that no fence and no list encloses. */
function split(text) {
  const sources = [];
  let lines = [];
  let fence = null;
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    const mark = line.match(FENCE)?.[1];
    if (fence) {
      if (closes(line, fence)) fence = null;
    } else if (mark) {
      fence = mark;
    }
    const starts = !fence && lines.at(-1)?.trim() === "" && line.trim() && !/^\s|^[-*+]\s|^\d+[.)]\s/.test(line);
    if (starts) {
      sources.push(lines.join("\n"));
      lines = [];
    }
    lines.push(line);
  }
  sources.push(lines.join("\n"));
  return sources;
}

const closes = (line, fence) =>
  line.trim().startsWith(fence) && /^[`~]+$/.test(line.trim());

/** Returns the elements of some lines. */
function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [element, next] = block(lines, at, depth);
    made.push(element);
    at = next;
  }
  return made;
}

function block(lines, at, depth) {
  const line = lines[at];
  const fence = line.match(FENCE);
  if (fence) return fenced(lines, at, fence);
  const heading = line.match(HEADING);
  if (heading) return [h(`h${heading[1].length}`, {}, ...inline(heading[2])), at + 1];
  if (RULE.test(line)) return [h("hr"), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
    return table(lines, at);
  }
  return paragraph(lines, at);
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) end += 1;
  const text = lines.slice(at, end).map((line) => line.trimStart()).join("\n");
  return [h("p", {}, ...inline(text.trimEnd())), end];
}

const interrupts = (line) =>
  FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line) || ITEM.test(line);

function fenced(lines, at, [, mark, language]) {
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  return [codeBlock(code, language), Math.min(end + 1, lines.length)];
}

function codeBlock(code, language) {
  const copy = h("button", { type: "button", class: "quiet" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Select it to copy";
    }
  });
  const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), copy);
  const pre = h(
    "pre",
    { tabindex: "0", role: "region", "aria-label": `Code${language ? `, ${language}` : ""}` },
    h("code", {}, ...highlighted(code, language)),
  );
  return h("div", { class: "code" }, head, pre);
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [h("blockquote", {}, ...blocks(inner, depth + 1)), end];
}

function list(lines, at, depth) {
  const first = lines[at].match(ITEM);
  const base = first[1].length;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const item = line.match(ITEM);
    const indent = line.match(/^\s*/)[0].length;
    if (item && item[1].length <= base + 1 && /\d/.test(item[2]) === ordered && !RULE.test(line)) {
      items.push([item[3] ?? ""]);
    } else if (!line.trim() || indent > base) {
      items.at(-1).push(line.slice(Math.min(indent, base + 2)));
    } else if (item || interrupts(line) || !lines[end - 1].trim()) {
      break;
    } else {
      items.at(-1).push(line);
    }
    end += 1;
  }
  const start = ordered ? Number.parseInt(first[2], 10) : null;
  const made = items.map((item) => h("li", {}, ...tight(blocks(item, depth + 1))));
  return [h(ordered ? "ol" : "ul", { start: start === 1 ? null : start }, ...made), end];
}

/** Takes the paragraph off an item that has no other. */
function tight(elements) {
  const paragraphs = elements.filter((element) => element.tagName === "P");
  if (paragraphs.length !== 1 || elements[0] !== paragraphs[0]) return elements;
  return [...elements[0].childNodes, ...elements.slice(1)];
}

function table(lines, at) {
  const aligns = cells(lines[at + 1]).map((mark) =>
    mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null,
  );
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line, tag) =>
    h("tr", {}, ...cells(line).slice(0, aligns.length)
      .map((text, index) => h(tag, { class: aligns[index] }, ...inline(text))));
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const made = h("table", {}, h("thead", {}, row(lines[at], "th")), h("tbody", {}, ...body));
  return [h("div", { class: "table-box" }, made), end];
}

const cells = (line) =>
  line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

// -- within a line --

const SPANS = [
  [/^(`+)([\s\S]*?[^`])\1(?!`)/, ([, , code]) => h("code", {}, code.replace(/^ (.*) $/s, "$1"))],
  [/^!?\[([^\]\n]{0,500})\]\(<?([^\s)>]{1,2000})>?(?:\s+"[^"]*")?\)/, ([, text, url], depth) => link(text, url, depth)],
  [/^<(https?:\/\/[^\s>]{1,2000})>/, ([, url], depth) => link(url, url, depth)],
  [/^(\*\*|__)(?=\S)([\s\S]*?\S)\1/, ([, , text], depth) => h("strong", {}, ...inline(text, depth + 1))],
  [/^~~(?=\S)([\s\S]*?\S)~~/, ([, text], depth) => h("del", {}, ...inline(text, depth + 1))],
  [/^\*(?=\S)([^*]*?[^\s*])\*(?!\*)/, ([, text], depth) => h("em", {}, ...inline(text, depth + 1))],
  [/^_(?=\S)([^_]*?[^\s_])_(?!\w)/, ([, text], depth) => h("em", {}, ...inline(text, depth + 1))],
  [/^https?:\/\/[^\s<>()]{1,2000}[^\s<>().,;:!?'"]/, ([url], depth) => link(url, url, depth)],
  [/^\\([\\`*_{}[\]()#+\-.!|~>])/, ([, mark]) => mark],
  [/^ {2,}\n/, () => h("br")],
];

const SPECIAL = /[`!\[<*_~\\h]| {2,}\n/g;

function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const made = [];
  let plain = 0;
  SPECIAL.lastIndex = 0;
  for (let found = SPECIAL.exec(text); found; found = SPECIAL.exec(text)) {
    const at = found.index;
    const inWord = /\w/.test(text[at - 1] ?? "");
    if (inWord && (text[at] === "_" || text[at] === "h")) continue;
    const [match, make] = span(text.slice(at));
    if (!match) continue;
    if (at > plain) made.push(text.slice(plain, at));
    made.push(make(match, depth));
    plain = at + match[0].length;
    SPECIAL.lastIndex = plain;
  }
  if (plain < text.length) made.push(text.slice(plain));
  return made;
}

function span(rest) {
  for (const [pattern, make] of SPANS) {
    const match = rest.match(pattern);
    if (match) return [match, make];
  }
  return [null, null];
}

/** Returns a link of a known scheme; the address of any other is shown as text. */
function link(text, url, depth) {
  if (!/^(https?:|mailto:)/i.test(url)) return `${text} (${url})`;
  const shown = text === url ? [text] : inline(text, depth + 1);
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...shown);
}
