"""Text notes that replace unsupported parts of a conversation: documents, and server-side tool
calls of other vendors.

Clients copy such parts from earlier conversations; without notes a later turn would fail or lose
context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TOLD = (
    *("name", "title", "url", "query", "queries", "text", "code", "command", "commands", "input"),
    *("arguments", "action", "content", "results", "output", "outputs", "logs", "stdout", "stderr"),
    *("operation", "path", "diff", "server_label", "filename", "error", "error_code"),
)
"""Fields with texts to include in a note; others hold ids, encrypted or binary data."""
MAX_NOTE = 4000
"""Maximum length of a note in characters."""


def build_note(part: dict[str, Any]) -> str:
    """Returns a note with a part's type and texts."""
    kind = str(part.get("type"))[:80]
    text = "; ".join(_texts(part))
    return f"[{kind}: {text[:MAX_NOTE]}]" if text else f"[{kind}]"


def describe_unread(kind: str, name: object = None) -> str:
    """Returns the note for an unsupported part, such as a document."""
    about = f" {name!r}" if isinstance(name, str) and name else ""
    return f"[a part of type {kind}{about}, which this model cannot read]"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name in TOLD or not isinstance(value.get("type"), str):
                yield from _texts(part)
