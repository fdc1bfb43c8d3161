"""Spells texts, choices and structural tags in Lark's notation, as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


def literal(text: str, special: Mapping[str, int] | None = None) -> str:
    """Returns a text as a rule that matches it, each special token in it by its id."""
    if not special:
        return _quoted(text)
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = [part for part in re.split(f"({names})", text) if part]
    return " ".join(f"<[{special[part]}]>" if part in special else _quoted(part) for part in parts)


def choice(texts: Sequence[str]) -> str:
    """Returns the grammar of an answer that is one of some texts."""
    return "start: " + " | ".join(literal(text) for text in dict.fromkeys(texts)) + "\n"


def tags(
    structures: Sequence[Mapping[str, Any]], names: Sequence[str], special: Mapping[str, int]
) -> str:
    """Returns the grammar of free text with structures in it.

    Each structure has its `trigger`, its `begin` (which starts with the trigger) and its `end`;
    what lies between is the grammar of that place in `names`.
    """
    rules = [f"tag_{index}" for index in range(len(structures))]
    lark = [f"start: ({' | '.join(rules)})* FREE", "FREE: /(.|\\n)*/"]
    for rule, structure, name in zip(rules, structures, names, strict=True):
        trigger, begin = structure["trigger"], structure["begin"]
        rest, end = begin[len(trigger) :], structure["end"]
        parts = [literal(rest, special)] if rest else []
        parts += [f"@{name}", *([literal(end, special)] if end else [])]
        if trigger in special:
            lark.append(f"{rule}: FREE <[{special[trigger]}]> {' '.join(parts)}")
        else:
            lark.append(f"{rule}_opening[lazy]: FREE {literal(trigger)}")
            lark.append(f"{rule}: {rule}_opening {' '.join(parts)}")
    return "\n".join(lark) + "\n"


def _quoted(text: str) -> str:
    """Returns a text in quotes; llguidance reads no control characters, but their escapes."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", quoted)
