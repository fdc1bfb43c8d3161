// A conversation: turns of the user and answers, of which each may have several versions.
// Knows no element and no request.

import { textOf } from "./tokens.js";

/** One version of an answer; a branch begins with tokens of the version that it leaves. */
export class Version {
  constructor(tokens = [], source = null) {
    this.text = textOf(tokens);
    this.numGiven = tokens.length;
    this.source = source;
    this.reasoning = "";
    this.tokens = tokens;
    this.id = "";
    this.isRunning = false;
    this.finishReason = null;
    this.fault = "";
    this.facts = null;
  }
}

export class Conversation {
  constructor(saved = []) {
    this.turns = saved.map((turn) =>
      turn.role === "user" ? turn : { role: "assistant", versions: turn.versions.map(revived), at: turn.at },
    );
  }

  get last() {
    return this.turns.at(-1);
  }

  /** Adds what the user says, and an answer that is still empty. */
  ask(text) {
    this.turns.push({ role: "user", text });
    return this.answer();
  }

  answer() {
    const turn = { role: "assistant", versions: [new Version()], at: 0 };
    this.turns.push(turn);
    return turn;
  }

  /** Gives a turn a further version and drops what followed it. */
  again(turn, tokens = [], source = null) {
    this.turns.length = this.turns.indexOf(turn) + 1;
    turn.versions.push(new Version(tokens, source));
    turn.at = turn.versions.length - 1;
    return turn;
  }

  /** Puts another text in place of what the user said, and an empty answer behind it. */
  edit(turn, text) {
    this.turns.length = this.turns.indexOf(turn);
    return this.ask(text);
  }

  /** Returns the messages before a turn, or all of them. */
  messages(system, before = null) {
    const end = before === null ? this.turns.length : this.turns.indexOf(before);
    const made = system.trim() ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns.slice(0, end)) {
      made.push({ role: turn.role, content: turn.role === "user" ? turn.text : shown(turn).text });
    }
    return made;
  }

  saved() {
    return this.turns.map((turn) =>
      turn.role === "user" ? turn : { role: turn.role, at: turn.at, versions: turn.versions.map(plain) },
    );
  }
}

/** Returns the version of an answer that is looked at. */
export const shown = (turn) => turn.versions[turn.at];

const plain = ({ id, text, reasoning, finishReason, fault, facts, tokens, numGiven }) =>
  ({ id, text, reasoning, finishReason, fault, facts, tokens, numGiven });

const revived = (saved) => Object.assign(new Version(), saved);
