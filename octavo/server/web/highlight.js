// Colours for code: comments, strings, numbers and keywords, told apart by rules that most
// languages share. Nothing is ever wrong for want of a grammar: what is unknown stays plain.

import { h } from "./dom.js";

const KEYWORDS = new Set(
  ("abstract and as assert async await begin bool boolean break byte case catch char class const " +
    "continue crate def default defer del delete do double elif else end enum except export " +
    "extends extern false final finally float fn for foreach from func function global go goto if " +
    "impl implements import in include instanceof int interface is lambda let long loop match mod " +
    "module mut namespace new nil None nonlocal not null of or package pass private protected pub " +
    "public raise return self short signed sizeof static string struct super switch template this " +
    "throw throws trait True False true try type typedef typeof undefined union unsafe unsigned " +
    "until use using var virtual void volatile where while with yield " +
    "SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE JOIN LEFT INNER ON GROUP ORDER BY " +
    "LIMIT CREATE TABLE AND OR NOT NULL AS").split(" "),
);
const HASH_COMMENTS = new Set(
  "python py bash sh shell zsh ruby rb yaml yml toml r perl make makefile dockerfile".split(" "),
);
const DASH_COMMENTS = new Set("sql lua haskell hs".split(" "));
const PLAIN = new Set(["", "text", "txt", "output", "console", "markdown", "md"]);
const STRINGS = /"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|`(?:\\.|[^`\\])*`?/;
const REST = /\b\d[\w.]*|[A-Za-z_$][\w$]*/;

/** Returns the nodes of a code in a language. */
export function highlighted(code, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || code.length > 50_000) return [code];
  const made = [];
  let at = 0;
  for (const match of code.matchAll(patternOf(name))) {
    const kind = kindOf(match);
    if (!kind) continue;
    if (match.index > at) made.push(code.slice(at, match.index));
    made.push(h("span", { class: kind }, match[0]));
    at = match.index + match[0].length;
  }
  made.push(code.slice(at));
  return made;
}

function patternOf(language) {
  let comment = String.raw`\/\/.*|\/\*[\s\S]*?(?:\*\/|$)`;
  if (HASH_COMMENTS.has(language)) comment = "#.*";
  if (DASH_COMMENTS.has(language)) comment = "--.*";
  if (language === "html" || language === "xml") comment = String.raw`<!--[\s\S]*?(?:-->|$)`;
  return new RegExp(`(${comment})|(${STRINGS.source})|(${REST.source})`, "g");
}

function kindOf([text, comment, string]) {
  if (comment !== undefined) return "c";
  if (string !== undefined) return "s";
  if (/^\d/.test(text)) return "n";
  return KEYWORDS.has(text) ? "k" : null;
}
