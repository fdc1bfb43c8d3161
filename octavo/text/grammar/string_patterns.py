"""Converts a JSON schema's `pattern` and `format` to regular expressions of complete strings, for
terminals.

Handles alternatives and anchors; other syntax is left to the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from octavo.text.grammar.strings import rewrite_pattern

ANYTHING = r"(.|\n)*"
ASCII_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
"""ECMA-262's character classes; the compiler's classes are Unicode."""
DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:([0-5][0-9]|60)(\.[0-9]+)?([zZ]|[+\-]{CLOCK})"
LABEL = r"[0-9A-Za-z]([0-9A-Za-z\-]{0,61}[0-9A-Za-z])?"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
SPAN = "T([0-9]+H([0-9]+M)?([0-9]+S)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
DAYS = "([0-9]+Y([0-9]+M)?([0-9]+D)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
HEX = "[0-9A-Fa-f]{1,4}"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}[tT]{TIME}",
    "duration": f"P([0-9]+W|{DAYS}({SPAN})?|{SPAN})",
    "email": rf"[0-9A-Za-z_+\-]+(\.[0-9A-Za-z_+\-]+)*@{LABEL}(\.{LABEL})*",
    "hostname": rf"{LABEL}(\.{LABEL})*",
    "ipv4": rf"{BYTE}(\.{BYTE}){{3}}",
    "ipv6": f"({HEX}:){{7}}{HEX}|({HEX}:){{1,6}}:{HEX}|::({HEX}(:{HEX}){{0,5}})?",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][0-9A-Za-z+.\-]*:[^\s<>\x22\\^`{|}]*",
}
"""Formats that the compiler enforces, as regexes for unquoted strings."""


def whole_pattern(pattern: str) -> str:
    """Returns a regex for complete texts that match a pattern, for a Lark terminal."""
    pattern = re.sub(r"\\(.)", _ascii, rewrite_pattern(pattern), flags=re.DOTALL)
    whole = "|".join(_whole(branch) for branch in _branches(pattern))
    return whole.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")


def _ascii(match: re.Match[str]) -> str:
    return ASCII_CLASSES.get(match[1], match[0])


def _whole(branch: str) -> str:
    """Extends an alternative by arbitrary text on each side that has no anchor."""
    begins, ends = branch.startswith("^"), _ends_with_anchor(branch)
    inner = branch[1:] if begins else branch
    inner = inner[:-1] if ends else inner
    return f"{'' if begins else ANYTHING}({inner}){'' if ends else ANYTHING}"


def _ends_with_anchor(branch: str) -> bool:
    front = branch[:-1]
    num_escapes = len(front) - len(front.rstrip("\\"))
    return branch.endswith("$") and num_escapes % 2 == 0


def _branches(pattern: str) -> Iterator[str]:
    """Yields the alternatives of a pattern with slashes escaped."""
    branch = ""
    depth = 0
    in_class = False
    is_escaped = False
    for char in pattern:
        if char == "|" and not (depth or in_class or is_escaped):
            yield branch
            branch = ""
            continue
        branch += "\\/" if char == "/" and not is_escaped else char
        if not is_escaped:
            depth += (char == "(" and not in_class) - (char == ")" and not in_class)
            in_class = char == "[" or (in_class and char != "]")
        is_escaped = char == "\\" and not is_escaped
    yield branch
