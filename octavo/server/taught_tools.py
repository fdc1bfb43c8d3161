"""Tools for models whose chat template knows none: functions, calls and results as plain text.

The functions stand in the system's message, in Hermes's notation, which such a model is asked to
answer in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

INTRODUCTION = (
    "You may call functions to help with the user's request. These are their signatures, one a"
    " line:\n<tools>\n{}\n</tools>\n\nTo call a function, write a JSON object with its name and"
    " arguments between tags:\n"
    '<tool_call>\n{{"name": "a function", "arguments": {{}}}}\n</tool_call>'
)


def taught_messages(
    messages: Sequence[dict[str, Any]], definitions: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns messages of which the system's first one ends with the functions."""
    lines = "\n".join(json.dumps(definition, ensure_ascii=False) for definition in definitions)
    text = INTRODUCTION.format(lines)
    first, rest = messages[0], list(messages[1:])
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def plain_history(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in which calls and results are text, each where it was."""
    return [_plain(message) for message in messages]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("tool_calls"):
        calls = [_call(call["function"]) for call in message["tool_calls"]]
        content = "\n".join([*([message["content"]] if message["content"] else []), *calls])
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**rest, "content": content}
    if message["role"] == "tool":
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": result}
    return message


def _call(function: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
