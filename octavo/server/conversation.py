"""A chat request in a common form for all APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.api.errors import InvalidRequest
from octavo.frontend.prompt_inputs import Truncation
from octavo.server.fallback_tools import add_tool_prompt, convert_calls
from octavo.server.generation import make_chat_prompt
from octavo.server.output_parser import OutputParser, build_parser, continued_text
from octavo.server.roles import move_tool_images
from octavo.server.state.served_model import ServedModel
from octavo.server.tool_use import ToolUse, rename_functions
from octavo.text.ports import DEFAULT_RENDERING, Rendering


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat request, and how the chat template renders them."""

    messages: list[dict[str, Any]]
    """Messages with at least `role` and plain-text `content`."""
    cache_salt: str | None = None
    rendering: Rendering = DEFAULT_RENDERING
    truncation: Truncation | None = None
    tools: ToolUse | None = None
    """Tools that the model may call; None without any."""
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
                f"thinking_token_budget: `{model.name}` does not reason",
                param="thinking_token_budget",
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
