"""Tools as plain text, for models whose chat template does not support them.

The tools are described in the system message, in Hermes's format, which the model is asked to use.
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


def add_tool_prompt(
    messages: Sequence[dict[str, Any]], definitions: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Appends the tools to the system message, or inserts one."""
    lines = "\n".join(json.dumps(definition, ensure_ascii=False) for definition in definitions)
    text = INTRODUCTION.format(lines)
    first, rest = messages[0], list(messages[1:])
    if first["role"] in ("system", "developer"):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def convert_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts tool calls and results to text."""
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
