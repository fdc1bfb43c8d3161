r"""Rules for values in tool-call formats that write strings unquoted, up to a closing text. The
grammar and the parser both use them:

- A parameter that does not admit strings is written as JSON.
- A string is written unquoted. If the parameter also admits other types, a text that is JSON of one
  of them is that value: `null` is null, `12` a number, and a text that begins with `{` or `[` an
  object or a list. Any other text is the string itself.
- A string that contains the closing text or would be parsed as another type is written as a JSON
  string in which the closing text is escaped: `"\u003c/parameter>"`. Only text in the exact form
  that `quote` returns is unquoted; `"a phrase"` is a string that includes its quotes.
- A closing text inside a string of a list or an object does not end the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence

from octavo.text.grammar.lark import literal
from octavo.text.grammar.normal_schema import NUMBERS, Leaf
from octavo.text.grammar.string_patterns import FORMATS, whole_pattern

MAX_QUOTED = 1024
"""Maximum length of a JSON string that is interpreted as a quoted text; longer ones are used
literally.
"""
INTEGER = r"-?(0|[1-9][0-9]*)"
NUMBER = rf"{INTEGER}(\.[0-9]+)?([eE][+\-]?[0-9]+)?"
BEGUN_NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?([eE][+\-]?[0-9]*)?)?")
BEGUN_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*(?:\\|"\n?)?')
WHOLE_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
BRACKETS = {"object": "{", "array": "["}
STRING = frozenset({"string"})
ANYTHING = r"/(.|\n)*/"


def quote(text: str, closing: str) -> str:
    """Returns a text as a JSON string with each closing text escaped."""
    parts = (json.dumps(part, ensure_ascii=False)[1:-1] for part in text.split(closing))
    return f'"{_escape(closing).join(parts)}"'


def _escape(closing: str) -> str:
    return f"\\u{ord(closing[0]):04x}{json.dumps(closing[1:], ensure_ascii=False)[1:-1]}"


def needs_quotes(text: str, closing: str, types: Collection[str]) -> bool:
    """Returns whether a string cannot be written unquoted."""
    return closing in text or is_other_type(text, types)


def is_other_type(text: str, types: Collection[str]) -> bool:
    """Returns whether a text is a value of a non-string type."""
    if any(name in types and text.startswith(char) for name, char in BRACKETS.items()):
        return True
    return re.fullmatch(_scalars(types), text) is not None


def _scalars(types: Collection[str]) -> str:
    """Returns the pattern of JSON scalars of some non-string types."""
    patterns = [*(["null"] if "null" in types else []), *_booleans(types)]
    if not NUMBERS.isdisjoint(types):
        patterns.append(NUMBER if "number" in types else INTEGER)
    return "|".join(patterns) or r"[^\s\S]"


def _booleans(types: Collection[str]) -> list[str]:
    return ["true", "false"] if "boolean" in types else []


# -- reading ---------------------------------------------------------------------------------------


def may_be_json(text: str, types: Collection[str]) -> bool:
    """Returns whether a partial text may still be JSON instead of a string."""
    if not text:
        return True
    if any(name in types and text[0] == char for name, char in BRACKETS.items()):
        return True
    if text[0] == '"':
        return len(text) <= MAX_QUOTED and BEGUN_STRING.fullmatch(text) is not None
    text = text.removesuffix("\n")
    words = [*(["null"] if "null" in types else []), *_booleans(types)]
    if any(word.startswith(text) for word in words):
        return True
    return not NUMBERS.isdisjoint(types) and BEGUN_NUMBER.fullmatch(text) is not None


def is_inside_string(text: str, types: Collection[str]) -> bool:
    """Returns whether a partial value is a list or object with an open string."""
    kinds = [name for name, char in BRACKETS.items() if text.lstrip().startswith(char)]
    if not kinds or ("string" in types and kinds[0] not in types):
        return False
    return '"' in WHOLE_STRING.sub("", text)


def read_raw(text: str, closing: str, types: Collection[str]) -> str:
    """Returns the JSON of a value whose parameter allows strings."""
    if text[:1] == '"' and len(text) <= MAX_QUOTED and is_json(text):
        unquoted = json.loads(text)
        if needs_quotes(unquoted, closing, types) and quote(unquoted, closing) == text:
            return text
    elif is_other_type(text, types) and is_json(text):
        return text
    return json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    """Returns whether a text is JSON without NaN and Infinity."""
    try:
        json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        return False
    return True


def _reject(constant: str) -> None:
    raise ValueError(constant)


# -- grammars --------------------------------------------------------------------------------------


def json_types(leaves: Sequence[Leaf]) -> frozenset[str]:
    """Returns the types of a string parameter that are written as JSON, because no regex describes
    them: lists, objects, bounded numbers.
    """
    types: set[str] = set()
    for leaf in leaves:
        types |= leaf.types & set(BRACKETS)
        numbers = leaf.having(NUMBERS)
        if numbers is not None and numbers.values is None and _has_bounds(numbers):
            types |= numbers.types
    return frozenset(types)


def _has_bounds(leaf: Leaf) -> bool:
    strings = ("minLength", "maxLength", "pattern", "format")
    return any(key not in strings for key, _ in leaf.limits)


def raw_terminal(leaves: Sequence[Leaf], closing: str, types: Collection[str]) -> str:
    """Returns the terminal of a value's texts except `json_types`; "" if there is none.

    `types` are those that the parser assumes for the parameter.
    """
    by_json = json_types(leaves)
    plain = plain_terminal(closing, types, by_json)
    options: list[str] = []
    for leaf in leaves:
        strings = leaf.having(STRING)
        if strings is not None:
            options += _strings(strings, closing, types, plain)
        others = leaf.having(leaf.types - STRING - by_json)
        if others is not None:
            options += _others(others)
    if not options and not by_json:  # an enumeration of strings none of which can be written
        options.append(plain)
    return " | ".join(dict.fromkeys(options))


def plain_terminal(closing: str, types: Collection[str], by_json: Collection[str] = ()) -> str:
    """Returns the terminal of unquoted strings."""
    banned = [rf"(.|\n)*{_regex(closing)}(.|\n)*", rf'"(.|\n)*{_regex(_escape(closing))}(.|\n)*"']
    if others := frozenset(types) - STRING:
        banned += [rf'"?({_scalars(others)})"?'] if others - set(BRACKETS) else []
    chars = "".join(f"\\{char}" for name, char in BRACKETS.items() if name in types)
    digits = "" if NUMBERS.isdisjoint(by_json) else r"0-9\-"
    begins = _beginnings(chars, digits) if chars or digits else ANYTHING
    return " & ".join([begins, *(f"~/{pattern}/" for pattern in banned)])


def _beginnings(chars: str, digits: str) -> str:
    """Returns the terminal of texts that do not begin with some characters, nor with a quote
    followed by one of `chars`.

    The pattern is positive, because as a negation one mask would take 20x the regex work, and with
    a further pattern more than `STEP_LEXER_FUEL`.
    """
    quoted = rf"[^{chars}](.|\n)*" if chars else r"(.|\n)*"
    return rf'/([^"{chars}{digits}](.|\n)*|"({quoted})?)?/'


def _strings(leaf: Leaf, closing: str, types: Collection[str], plain: str) -> list[str]:
    if leaf.values is not None:
        spelled = (_spell(text, closing, types) for text in leaf.values)
        return [literal(text) for text in spelled if text is not None]
    limits = [f"/{whole_pattern(pattern)}/" for pattern in leaf.get_limits("pattern")]
    limits += [f"/{FORMATS[name]}/" for name in leaf.get_limits("format") if name in FORMATS]
    min_length = max(leaf.get_limits("minLength"), default=0)
    max_length = min(leaf.get_limits("maxLength"), default=None)
    if min_length or max_length is not None:
        limits.append(rf"/(.|\n){{{min_length},{'' if max_length is None else max_length}}}/")
    return [" & ".join([*limits, plain])]


def _spell(text: str, closing: str, types: Collection[str]) -> str | None:
    """Returns the text with which a string is written; None if it cannot be written."""
    written = quote(text, closing) if needs_quotes(text, closing, types) else text
    is_read = json.loads(read_raw(written, closing, types)) == text
    return written if is_read and closing not in written else None


def _others(leaf: Leaf) -> list[str]:
    if leaf.values is not None:
        return [literal(json.dumps(value)) for value in leaf.values]
    return [f"/{_scalars(leaf.types)}/"]


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
