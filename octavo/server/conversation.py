"""A chat request in a common form for all APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.api.errors import InvalidRequest
from octavo.frontend.prompt_inputs import Truncation
from octavo.server.output_parser import OutputParser, build_parser, continued_text
from octavo.server.output_streams import make_chat_prompt
from octavo.server.roles import move_tool_images
from octavo.server.state.served_model import ServedModel
from octavo.server.tool_use import ToolUse, rename_functions
from octavo.text.ports import DEFAULT_RENDERING, Rendering

INTRODUCTION = (
    "You may call functions to help with the user's request. These are their signatures, one a"
    " line:\n<tools>\n{}\n</tools>\n\nTo call a function, write a JSON object with its name and"
    " arguments between tags:\n"
    '<tool_call>\n{{"name": "a function", "arguments": {{}}}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat request, and how the chat template renders them."""

    messages: list[dict[str, Any]]
    """Messages, each with at least a `role` and plain-text `content`."""
    cache_salt: str | None = None
    rendering: Rendering = DEFAULT_RENDERING
    truncation: Truncation | None = None
    tools: ToolUse | None = None
    """Tools that the model may call; None if there are none."""
    thinking_budget: int | None = None
    """Maximum number of reasoning tokens; None: no limit."""

    async def prompt(self, model: ServedModel) -> dict[str, Any]:
        """Returns the prompt as token ids."""
        if self.tools is not None:
            # Compiles the schemas in a thread; `parser` finds them cached.
            await asyncio.to_thread(self.tools.get_enforced_schemas)
        messages, rendering = self._with_tools(model)
        return await make_chat_prompt(
            model.llm,
            messages,
            cache_salt=self.cache_salt,
            rendering=rendering,
            truncation=self.truncation,
        )

    def parser(self, model: ServedModel, prompt: Mapping[str, Any]) -> OutputParser:
        """Returns the parser of responses to the prompt."""
        if self.thinking_budget is not None and model.formats.reasoning is None:
            raise InvalidRequest(
                f"thinking_token_budget: `{model.name}` does not support reasoning",
                param="thinking_token_budget",
                hint="omit thinking_token_budget",
            )
        return build_parser(
            model.formats,
            model.tokenizer,
            prompt["prompt_token_ids"],
            tools=self.tools,
            continued=continued_text(self.messages, self.rendering),
            thinking_budget=self.thinking_budget,
        )

    def _with_tools(self, model: ServedModel) -> tuple[list[dict[str, Any]], Rendering]:
        """Returns messages and rendering options that include the tools: in the template's own
        format, or described in plain text.
        """
        reads_images = "image" in model.llm.media
        messages = move_tool_images(self.messages, reads_images=reads_images)
        aliases = {} if self.tools is None else self.tools.aliases(model.formats.tools)
        if aliases:
            messages = rename_functions(messages, aliases)
        rendering = self.rendering
        is_own = rendering.template is not None
        formats = model.formats
        template = formats.template if self.tools is None else formats.tool_template
        if not is_own and "tool_calls" not in template:
            messages = convert_calls(messages)
        if self.tools is None:
            return messages, rendering
        definitions = self.tools.definitions(aliases)
        if is_own or formats.reads_tools:
            variables = {**rendering.variables, "tools": definitions}
            return messages, replace(rendering, variables=variables)
        return add_tool_prompt(messages, definitions), rendering


def add_tool_prompt(
    messages: Sequence[dict[str, Any]], definitions: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Appends the tools to the system message, or inserts one.

    The system message describes the tools in the Hermes format and asks the model to use that
    format.
    """
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
