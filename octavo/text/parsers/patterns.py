"""A JSON schema's `pattern`, which a text holds anywhere, as a regular expression of whole texts.

Knows alternatives and their anchors; what else a pattern says is left as it is, for the compiler to
read or to refuse.
"""

from __future__ import annotations

from collections.abc import Iterator

ANYTHING = r"(.|\n)*"


def whole_pattern(pattern: str) -> str:
    """Returns the regular expression of the texts that match a pattern, for a Lark terminal."""
    whole = "|".join(_whole(branch) for branch in _branches(pattern))
    return whole.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")


def _whole(branch: str) -> str:
    """Returns one alternative with anything before and behind it, where it has no anchor there."""
    begins, ends = branch.startswith("^"), _ends_with_anchor(branch)
    inner = branch[1:] if begins else branch
    inner = inner[:-1] if ends else inner
    return f"{'' if begins else ANYTHING}({inner}){'' if ends else ANYTHING}"


def _ends_with_anchor(branch: str) -> bool:
    front = branch[:-1]
    num_escapes = len(front) - len(front.rstrip("\\"))
    return branch.endswith("$") and num_escapes % 2 == 0


def _branches(pattern: str) -> Iterator[str]:
    """Yields the alternatives of a pattern, slashes escaped."""
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
