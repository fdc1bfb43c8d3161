"""Converts Anthropic's messages to a plain conversation for the chat template."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from octavo.api.errors import InvalidRequest, shown
from octavo.server.anthropic.bodies import (
    ContentBlock,
    CountTokensBody,
    PlainBlock,
    TurnMessage,
)
from octavo.server.conversation import Conversation
from octavo.server.ignored import IgnoredFields, quote_label
from octavo.server.images import block_source, image_part, join_parts, text_part
from octavo.server.notes import describe_unread
from octavo.server.plain_chat import block_text, join_text, make_rendering
from octavo.server.state.served_model import ServedModel
from octavo.server.tool_use import (
    Choice,
    OfferedFunction,
    ToolNames,
    ToolUse,
    check_role,
    make_tool_use,
    parse_arguments,
)

EFFORT = "reasoning_effort"
"""Chat template variable for the reasoning effort."""
TOOL_NAMES = ToolNames(name="name", parameters="input_schema")
CHOICES: dict[str, Choice] = {
    "auto": "auto",
    "none": "none",
    "any": "required",
    "tool": "required",
}


def parse_conversation(body: CountTokensBody, model: ServedModel) -> Conversation:
    """Returns the body's conversation; raises InvalidRequest for unsupported content."""
    if not body.messages:
        raise InvalidRequest(
            "messages: got an empty list, expected at least one message", param="messages"
        )
    messages = _messages(body)
    enable_thinking = _get_thinking(body, model)
    rendering = make_rendering(messages, model, continues=True, enable_thinking=enable_thinking)
    variables = {**rendering.variables, **_effort(body, model)}
    return Conversation(
        messages,
        rendering=replace(rendering, variables=variables),
        tools=_tools(body, model),
        thinking_budget=body.thinking.budget_tokens if body.thinking and enable_thinking else None,
    )


def _effort(body: CountTokensBody, model: ServedModel) -> dict[str, Any]:
    """Returns the template variables for the effort. "high" is the default, so it is accepted even
    if the template has no effort variable.
    """
    effort = None if body.output_config is None else body.output_config.effort
    known = frozenset() if model.tokenizer is None else model.tokenizer.template_variables
    if effort is None or (effort == "high" and EFFORT not in known):
        return {}
    if EFFORT in known:
        return {EFFORT: effort}
    body.ignored.add(
        "output_config.effort",
        f"got {effort!r}, but the model's chat template has no such variable; expected 'high'",
    )
    return {}


def _tools(body: CountTokensBody, model: ServedModel) -> ToolUse | None:
    functions = [
        OfferedFunction(
            tool.name, tool.input_schema, tool.description, is_strict=tool.strict is True
        )
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    if choice is None:
        return make_tool_use(functions, None, model.limits, names=TOOL_NAMES, ignored=body.ignored)
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            f"tool_choice: got the type {choice.type!r} with the name {choice.name!r}, expected a"
            f" name with the type 'tool' only",
            param="tool_choice.name",
        )
    return make_tool_use(
        functions,
        CHOICES[choice.type],
        model.limits,
        named=None if choice.name is None else [choice.name],
        is_parallel=not choice.disable_parallel_tool_use,
        names=TOOL_NAMES,
        ignored=body.ignored,
    )


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    """Returns plain messages; consecutive texts of the same role are merged."""
    plain: list[dict[str, Any]] = []
    if body.system:
        plain.append({"role": "system", "content": _system_text(body)})
    users = [index for index, message in enumerate(body.messages) if message.role == "user"]
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        for converted in _convert_message(
            message, where, body.ignored, is_asked=index in users[-1:]
        ):
            last = plain[-1] if plain else None
            if last is not None and last["role"] == converted["role"] and _is_text(last, converted):
                plain[-1] = converted | {"content": f"{last['content']}\n{converted['content']}"}
            else:
                plain.append(converted)
    return plain


def _system_text(body: CountTokensBody) -> str:
    blocks = body.system or ""
    if isinstance(blocks, str):
        return blocks
    parts = [
        _convert_or_note(block, f"system[{index}]", body.ignored)
        for index, block in enumerate(blocks)
    ]
    return "\n".join(part["text"] for part in parts)


def _is_text(*messages: dict[str, Any]) -> bool:
    return all(
        message.keys() == {"role", "content"} and isinstance(message["content"], str)
        for message in messages
    )


def _convert_message(
    message: TurnMessage, where: str, ignored: IgnoredFields, *, is_asked: bool
) -> list[dict[str, Any]]:
    """Converts a message to plain ones; tool results become separate messages in front of it.

    An unsupported block raises InvalidRequest in the last user message and is replaced by a note in
    earlier messages.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for index, block in enumerate(message.content):
        path = f"{where}[{index}]"
        if block.type == "tool_result":
            check_role(message.role, "user", path)
            results.append(_convert_result(block, path, ignored))
        elif block.type == "tool_use":
            check_role(message.role, "assistant", path)
            about.setdefault("tool_calls", []).append(_convert_call(block, path))
        elif block.type == "thinking":
            check_role(message.role, "assistant", path)
            thought = about.get("reasoning_content", "") + (block.thinking or "")
            about["reasoning_content"] = thought
        elif is_asked:
            parts.append(_convert_block(block, path))
        else:
            parts.append(
                _convert_or_note(block, path, ignored, reads_images=message.role == "user")
            )
    if not (parts or about) and results:
        return results
    return [*results, {"role": message.role, "content": join_parts(parts), **about}]


def _convert_call(block: ContentBlock, where: str) -> dict[str, Any]:
    if block.id is None or block.name is None:
        raise InvalidRequest(f"{where}: tool_use requires an id, a name and an input", param=where)
    function = {"name": block.name, "arguments": parse_arguments(block.input)}
    return {"id": block.id, "type": "function", "function": function}


def _convert_result(block: ContentBlock, where: str, ignored: IgnoredFields) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise InvalidRequest(f"{where}.tool_use_id: field required", param=f"{where}.tool_use_id")
    content = block.content or ""
    if isinstance(content, str):
        content = [PlainBlock(type="text", text=content)]
    parts = [
        _convert_or_note(inner, f"{where}.content[{block_index}]", ignored, reads_images=True)
        for block_index, inner in enumerate(content)
    ]
    if block.is_error:
        parts = _mark_as_error(parts)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": join_parts(parts)}


def _mark_as_error(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks a failed tool result in its text: chat templates have no field for it."""
    is_told = any(part.get("text", "").lower().startswith("error") for part in parts)
    return parts if is_told else [text_part("Error:"), *parts]


def _convert_or_note(
    block: PlainBlock, where: str, ignored: IgnoredFields, *, reads_images: bool = False
) -> dict[str, Any]:
    """Converts a block, or replaces it by a note if it is not supported."""
    try:
        if block.type != "image" or reads_images:
            return _convert_block(block, where)
    except InvalidRequest as error:
        reason = error.message.partition(": ")[2]
    else:
        reason = "images are only allowed in user messages"
    ignored.add(
        where, reason, shown_as=f"{where.rpartition('[')[0]}[type={quote_label(block.type)}]"
    )
    return text_part(describe_unread(block.type, block.title))


def _convert_block(block: PlainBlock, where: str) -> dict[str, Any]:
    """Converts a block; text documents and search results become text."""
    if block.type == "image":
        return image_part(block_source(block.source, f"{where}.source"))
    if block.type == "document":
        about = [block.title or "", block.context or "", _document(block.source, where)]
        return text_part("\n".join(filter(None, about)))
    if block.type == "search_result":
        about = [block.title or "", str(block.source or "")]
        text = join_text(block.content or "", f"{where}.content")
        return text_part("\n".join(filter(None, [*about, text])))
    return text_part(block_text(block, where))


def _document(source: object, where: str) -> str:
    """Returns the text of a document; raises InvalidRequest for a PDF, a URL or a stored file."""
    fields = source if isinstance(source, dict) else {}
    data = fields.get("data") if fields.get("type") == "text" else fields.get("content")
    if str(fields.get("media_type")).startswith("text/") and fields.get("type") == "base64":
        data = _decode(fields.get("data"))
    if isinstance(data, list):
        data = "\n".join(
            str(part["text"]) for part in data if isinstance(part, dict) and "text" in part
        )
    if not isinstance(data, str):
        raise InvalidRequest(
            f"{where}.source: got a document of type {shown(fields.get('type'))}, expected 'text'"
            " with data, or 'content'",
            hint="send the document as text",
            param=f"{where}.source",
        )
    return data


def _decode(data: object) -> str | None:
    """Returns the text of a base64 document; None if it is not text."""
    try:
        return base64.b64decode(str(data), validate=True).decode()
    except ValueError:
        return None


def _get_thinking(body: CountTokensBody, model: ServedModel) -> bool | None:
    """Returns whether thinking is on; None leaves it to the template."""
    thinking = body.thinking
    if thinking is None:
        return None
    if thinking.type == "disabled":
        return False
    is_known = thinking.type in ("enabled", "adaptive")
    if is_known and model.formats.reasoning is not None:
        return True if thinking.type == "enabled" else None
    reason = (
        f"`{model.name}` does not support thinking" if is_known else "this mode is not supported"
    )
    body.ignored.add(
        "thinking",
        f"got the type {thinking.type!r}, but {reason}",
        hint='remove thinking, or send {"type": "disabled"}',
    )
    return None
