"""Incremental JSON parsing that copies values as written.

Only brackets and strings are tracked; clients receive exactly the text that the model wrote.
"""

from __future__ import annotations

import re

from octavo.text.parsers.source import CutText, Emit, MalformedText, Steps, TextSource

PLAIN = re.compile(r'[^"\\]+')
"""Unescaped characters of a string."""
BETWEEN = re.compile(r'[^"\[\]{}]+')
"""Characters in an object or list other than quotes and brackets."""
SCALAR = re.compile(r"[^\s,;\]}]+")
ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def copy_value(source: TextSource, emit: Emit) -> Steps[None]:
    """Emits one JSON value as written; raises CutText if the text ends inside it."""
    first = yield from source.next()
    if first == '"':
        yield from _copy_string(source, emit)
    elif first in "[{":
        yield from _copy_brackets(source, emit)
    else:
        yield from source.run(SCALAR, emit)


def at_key(source: TextSource) -> Steps[bool]:
    """Reads up to an object's next key; returns False if the object ends instead."""
    while True:
        yield from source.skip_space()
        char = yield from source.next()
        if char == '"':
            return True
        if char not in ",}":
            raise MalformedText
        source.take()
        if char == "}":
            return False


def read_string(source: TextSource) -> Steps[str]:
    """Returns a decoded JSON string; raises MalformedText if there is none."""
    pieces: list[str] = []
    yield from unescape_string(source, pieces.append)
    return "".join(pieces)


def unescape_string(source: TextSource, emit: Emit) -> Steps[None]:
    """Emits a decoded JSON string as it arrives."""
    yield from source.expect('"')
    while True:
        yield from source.run(PLAIN, emit)
        char = yield from source.next()
        source.take()
        if char == '"':
            return
        emit((yield from _escape(source)))


def _escape(source: TextSource) -> Steps[str]:
    """Decodes an escape after its backslash."""
    char = yield from source.next()
    source.take()
    if char != "u":
        return ESCAPES.get(char, char)
    code = yield from _code(source)
    if not 0xD800 <= code < 0xDC00:
        return _character(code)
    follows = yield from source.peek(2)
    if len(follows) < 2:
        raise CutText
    if follows == "\\u":
        source.take()
        source.take()
        low = yield from _code(source)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        return "\ufffd" + _character(low)
    return _character(code)


def _code(source: TextSource) -> Steps[int]:
    """Parses four hexadecimal digits."""
    digits = yield from source.peek(4)
    if len(digits) < 4:
        raise CutText
    if re.fullmatch("[0-9a-fA-F]{4}", digits) is None:
        raise MalformedText
    for _ in digits:
        source.take()
    return int(digits, 16)


def _character(code: int) -> str:
    """Returns the character of a code; U+FFFD for half a surrogate pair."""
    return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)


def _copy_string(source: TextSource, emit: Emit) -> Steps[None]:
    emit(source.take())
    while True:
        yield from source.run(PLAIN, emit)
        char = yield from source.next()
        emit(source.take())
        if char == '"':
            return
        yield from source.next()
        emit(source.take())


def _copy_brackets(source: TextSource, emit: Emit) -> Steps[None]:
    depth = 0
    while True:
        yield from source.run(BETWEEN, emit)
        char = yield from source.next()
        if char == '"':
            yield from _copy_string(source, emit)
            continue
        emit(source.take())
        depth += 1 if char in "[{" else -1
        if depth == 0:
            return
