"""Formats texts, choices and structural tags as Lark grammars for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.api.structured_outputs import GrammarSpec, MessageFrame

BETWEEN = r"BETWEEN: /[ \t\r\n]{0,8}/"
"""Whitespace rule between the parts of an output."""

DEFINED = re.compile(r"([^\W\d]\w*)\s*(?:\.\s*-?\d+\s*)?(?:\[[^\]]*\]\s*)?:")
"""Name of a rule or terminal in its definition."""
NAME = re.compile(r"[^\W\d]\w*")


def depth(grammar: str) -> int:
    """Returns the length of the longest chain of references among a grammar's rules and
    terminals.
    """
    definitions = list(DEFINED.finditer(grammar))
    ends = [*(match.start() for match in definitions[1:]), len(grammar)]
    bodies = {
        match[1]: grammar[match.end() : end] for match, end in zip(definitions, ends, strict=True)
    }
    met: set[str] = set()
    deepest, open_names = 0, [iter(bodies)]
    while open_names:
        name = next((name for name in open_names[-1] if name in bodies and name not in met), None)
        if name is None:
            open_names.pop()
            continue
        met.add(name)
        open_names.append(iter(NAME.findall(bodies[name])))
        deepest = max(deepest, len(open_names) - 1)
    return deepest


def literal(text: str, special: Mapping[str, int] | None = None) -> str:
    """Returns a rule that matches a text, with special tokens referenced by id."""
    if not special:
        return _quote(text)
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = [part for part in re.split(f"({names})", text) if part]
    return " ".join(f"<[{special[part]}]>" if part in special else _quote(part) for part in parts)


def choice(texts: Sequence[str]) -> str:
    """Returns the grammar of a choice between texts."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, dict.fromkeys(texts))) + "\n"


@dataclass(frozen=True, slots=True)
class TagLayout:
    """Number and position of the structures in an output."""

    at_least_one: bool = False
    """Whether the output consists only of structures."""
    stop_after_first: bool = False
    """Whether the output ends after the first structure."""
    begins_unlike: str = ""
    """Text that the output may not begin with."""


ANY_NUMBER = TagLayout()


def tags(
    structures: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    special: Mapping[str, int],
    layout: TagLayout = ANY_NUMBER,
) -> str:
    """Returns the grammar of free text with structures, or of structures only.

    Each structure has a `trigger`, a `begin` (starting with the trigger) and an `end`; its content
    is the grammar at the same index in `names`.
    """
    rules = [f"tag_{index}" for index in range(len(structures))]
    one = " | ".join(rules)
    if layout.at_least_one:
        more = "" if layout.stop_after_first else f" (BETWEEN ({one}))*"
        lark = [f"start: ({one}){more}", BETWEEN]
        for rule, structure, name in zip(rules, structures, names, strict=True):
            end = literal(structure["end"], special) if structure["end"] else ""
            lark.append(f"{rule}: {literal(structure['begin'], special)} @{name} {end}")
        return "\n".join(lark) + "\n"
    start = f"start: {one} | FREE" if layout.stop_after_first else f"start: ({one})* FREE"
    lark = [start, "FREE: /(.|\\n)*/"]
    if layout.begins_unlike and layout.begins_unlike not in special:
        heads = " | ".join(f"head_{index}" for index in range(len(structures)))
        more = "" if layout.stop_after_first else f" ({one})* FREE"
        lark[0] = f"start: ({heads}){more} | HEAD"
        lark.append(any_text("HEAD", layout.begins_unlike))
    for index, (structure, name) in enumerate(zip(structures, names, strict=True)):
        lark += _tag_rules(f"tag_{index}", "FREE", structure, name, special)
        if len(lark[0]) > len(start):
            lark += _tag_rules(f"head_{index}", "HEAD", structure, name, special)
    return "\n".join(lark) + "\n"


def build_message_grammar(
    structures: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    special: Mapping[str, int],
    frame: MessageFrame,
    layout: TagLayout,
) -> str:
    """Returns the grammar of messages, some or all of them structures, optionally after reasoning.

    The headers of other messages cannot contain the texts of the structures' headers.
    """
    own = " | ".join(f"tag_{index}" for index in range(len(structures)))
    opening, text, between = (
        literal(part, special) for part in (frame.opening, frame.text, frame.between)
    )
    thought = f"{opening} {literal(frame.thought, special)} {text}"
    limit = "" if frame.most_tokens is None else f"[max_tokens={frame.most_tokens}]"
    unlike = frame.unlike if frame.most_tokens is None else (*frame.unlike, frame.thought)
    # Reasoning that the output itself begins is a message, after which the output may end.
    may_end = frame.may_end_in_thought and frame.has_begun and frame.most_tokens is None
    last = " | think" if may_end else ""
    lark = [
        f"start: {_thoughts(frame, between)} ({_messages(own, between, layout)}){last}",
        f"message: {opening} HEADER {text} FREE",
        f"think: {'' if frame.has_begun else thought}{' cut' if frame.most_tokens != 0 else ''}",
        f"cut{limit}: /(.|\\n)*/",
        "FREE: /(.|\\n)*/",
        f"HEADER: {_without(unlike)}",
    ]
    for index, (structure, name) in enumerate(zip(structures, names, strict=True)):
        end = literal(structure["end"], special) if structure["end"] else ""
        lark.append(f"tag_{index}: {literal(structure['begin'], special)} @{name} {end}")
    return "\n".join(lark) + "\n"


def _thoughts(frame: MessageFrame, between: str) -> str:
    """Returns the rule before the first message."""
    if frame.has_begun:
        return f"think {between}"
    if not frame.thought:
        return ""
    return f"(think {between}){'*' if frame.most_tokens is None else '?'}"


def _messages(own: str, between: str, layout: TagLayout) -> str:
    """Returns the rule of an output's messages."""
    if layout.at_least_one:
        more = "" if layout.stop_after_first else f" ({between} ({own}))*"
        return f"({own}){more}"
    any_ = "message" if layout.stop_after_first else f"({own} | message)"
    last = f" | FREE ({own}) | FREE message ({between} message)* {between} ({own})"
    return f"FREE | FREE {any_} ({between} {any_})*{last if layout.stop_after_first else ''}"


def has_marks(frame: MessageFrame, special: Mapping[str, int]) -> bool:
    """Returns whether special tokens delimit all parts of messages."""
    between = any(frame.between.startswith(mark) for mark in special)
    return frame.opening in special and frame.text in special and between


def _without(texts: Iterable[str]) -> str:
    """Returns a pattern for texts that contain none of `texts`."""
    banned = "|".join(re.escape(text).replace("/", "\\/") for text in texts)
    return f"/(.|\\n)*/ & ~/(.|\\n)*({banned})(.|\\n)*/"


def any_text(rule: str, begins_unlike: str) -> str:
    """Returns a terminal for any text that does not begin with `begins_unlike`."""
    if not begins_unlike:
        return f"{rule}: /(.|\\n)*/"
    unlike = re.escape(begins_unlike).replace("/", "\\/")
    return f"{rule}: /(.|\\n)*/ & ~/{unlike}(.|\\n)*/"


def _tag_rules(
    rule: str, free: str, structure: Mapping[str, Any], name: str, special: Mapping[str, int]
) -> list[str]:
    """Returns the rules of one structure after free text."""
    trigger, begin = structure["trigger"], structure["begin"]
    rest, end = begin[len(trigger) :], structure["end"]
    parts = [literal(rest, special)] if rest else []
    parts += [f"@{name}", *([literal(end, special)] if end else [])]
    if trigger in special:
        return [f"{rule}: {free} <[{special[trigger]}]> {' '.join(parts)}"]
    return [
        f"{rule}_opening[lazy]: {free} {literal(trigger)}",
        f"{rule}: {rule}_opening {' '.join(parts)}",
    ]


def build_after_grammar(spec: GrammarSpec, name: str, special: Mapping[str, int]) -> str:
    """Returns the grammar of free text up to `starts_after`, followed by grammar `name`; with
    `may_end_before`, the output may also end within the free text.

    Whitespace between the two is allowed, as models write it. If the free text is bounded, `cut`
    comes first: when the bound is reached, llguidance completes the first rule that reached it.
    """
    closing = literal(spec.starts_after, special)
    max_tokens = spec.most_tokens_before
    limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
    if max_tokens == 0:
        before = f"before: {closing}"
    elif any(spec.starts_after.startswith(one) for one in special):
        before = f"before: cut {closing}\ncut{limit}: /(.|\\n)*/"
    elif max_tokens is None:
        before = f"before: closed\nclosed[suffix={closing}]: /(.|\\n)*/"
    else:
        before = (
            f"before: cut {closing} | closed\ncut{limit}: /(.|\\n)*/\n"
            f"closed[suffix={closing},max_tokens={max_tokens}]: /(.|\\n)*/"
        )
    opening = literal(spec.begins_with, special) if spec.begins_with else ""
    start = f"({opening} before)?" if opening else "before"
    last = (
        f" | {opening} FREE\nFREE: /(.|\\n)*/" if spec.may_end_before and max_tokens is None else ""
    )
    return f"start: {start} BETWEEN @{name}{last}\n{before}\n{BETWEEN}\n"


def _quote(text: str) -> str:
    """Quotes a text; llguidance accepts control characters only as escapes."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", quoted)
