"""One answer to a conversation, in no API's form: what the routes of every chat dialect build on.

A route turns its body into a `Conversation` and SamplingParams, starts a `Turn`, and gives the
turn's deltas or its whole output the form that its clients expect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel
from starlette.types import Receive

from octavo.engine.front.arguments import Prompt
from octavo.engine.front.input_processor import DEFAULT_ORIGIN, Origin
from octavo.engine.front.prompt_inputs import Truncation
from octavo.engine.front.sampling_defaults import params_over
from octavo.errors import ClientError, InvalidRequest
from octavo.outputs import RequestOutput
from octavo.prompt_ports import DEFAULT_RENDERING, Rendering
from octavo.sampling_params import SamplingParams
from octavo.server.connection import unless_gone
from octavo.server.deltas import Cursor, Delta
from octavo.server.generation import Generation, chat_prompt_of
from octavo.server.reading import (
    PLAIN,
    AnswerReading,
    AnswerWishes,
    continued_text,
    reading_of,
)
from octavo.server.roles import move_tool_images
from octavo.server.state.served_model import ServedModel
from octavo.server.taught_tools import plain_history, taught_messages
from octavo.server.tool_use import ToolUse, rename_functions


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat request and how the model's template is to render them."""

    messages: list[dict[str, Any]]
    """Messages with at least `role` and a `content` of plain text."""
    cache_salt: str | None = None
    rendering: Rendering = DEFAULT_RENDERING
    truncation: Truncation | None = None
    tools: ToolUse | None = None
    """Functions that the model may call; None for none."""
    thinking_budget: int | None = None
    """Most tokens of reasoning; None for no limit."""

    async def prompt(self, model: ServedModel) -> dict[str, Any]:
        """Returns the prompt's token ids, as the engine takes them."""
        if self.tools is not None:
            await asyncio.to_thread(self.tools.enforced)  # compiles; `reading` finds it cached
        messages, rendering = self._with_tools(model)
        return await chat_prompt_of(
            model.llm,
            messages,
            cache_salt=self.cache_salt,
            rendering=rendering,
            truncation=self.truncation,
        )

    def reading(self, model: ServedModel, prompt: Mapping[str, Any]) -> AnswerReading:
        """Returns how the answers to the conversation's prompt are read."""
        continued = continued_text(self.messages, self.rendering)
        wishes = AnswerWishes(self.tools, continued, self.thinking_budget)
        if self.thinking_budget is not None and model.formats.reasoning is None:
            raise InvalidRequest(
                f"thinking_token_budget: `{model.name}` does not reason",
                param="thinking_token_budget",
            )
        return reading_of(model.formats, model.tokenizer, prompt["prompt_token_ids"], wishes)

    def _with_tools(self, model: ServedModel) -> tuple[list[dict[str, Any]], Rendering]:
        """Returns the messages and how they are rendered, with the functions that there are: in the
        template's own way, or taught in plain text where it has none.
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
            messages = plain_history(messages)
        if self.tools is None:
            return messages, rendering
        definitions = self.tools.definitions(aliases)
        if is_own or formats.reads_tools:
            variables = {**rendering.variables, "tools": definitions}
            return messages, replace(rendering, variables=variables)
        return taught_messages(messages, definitions), rendering


class Turn:
    """The answer of one sample to a conversation, whole or as it grows."""

    def __init__(
        self, generation: Generation, reading: AnswerReading = PLAIN, *, every_token: bool = False
    ) -> None:
        """Makes a delta of tokens that show no text yet too, where `every_token` is true."""
        self._generation = generation
        self.reading = reading
        self._every_token = every_token
        self.latest: RequestOutput | None = None
        """Newest output, whose counts are the usage so far; None before the first token."""

    async def whole(self, receive: Receive) -> RequestOutput:
        """Returns the final output; aborts the request when its client goes."""
        (self.latest,) = await unless_gone(receive, self._generation.results())
        return self.latest

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields what the answer gains; the last has a finish_reason. Closing it aborts."""
        cursor = Cursor(reader=self.reading.reader())
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                self.latest = output
                delta = cursor.advance(output.outputs[0], every_token=self._every_token)
                if delta is not None:
                    yield delta


async def start_turn(
    model: ServedModel,
    conversation: Conversation,
    params: SamplingParams,
    request_id: str,
    *,
    origin: Origin = DEFAULT_ORIGIN,
    stream: bool,
) -> Turn:
    """Renders, checks and submits a conversation; raises the error of what is wrong with it."""
    prompt = await conversation.prompt(model)
    reading = conversation.reading(model, prompt)
    await model.llm.check_form(reading.fitted(params))
    return turn_of(model, prompt, params, request_id, reading=reading, origin=origin, stream=stream)


def turn_of(
    model: ServedModel,
    prompt: Prompt,
    params: SamplingParams,
    request_id: str,
    *,
    reading: AnswerReading = PLAIN,
    origin: Origin = DEFAULT_ORIGIN,
    stream: bool,
) -> Turn:
    """Submits a prompt that is ready for the engine."""
    params = reading.fitted(params)
    generation = Generation(model, [prompt], params, request_id, origin=origin, deltas=stream)
    return Turn(generation, reading, every_token=params.logprobs is not None)


def params_of(
    asked: BaseModel, names: Mapping[str, str], defaults: SamplingParams, **others: Any
) -> SamplingParams:
    """Returns the params that a body asks for, over the model's recommended values.

    `names` maps the API's names of fields to SamplingParams'; `others` are set over them.
    """
    given = {
        ours: value
        for theirs, ours in names.items()
        if (value := getattr(asked, theirs)) is not None
    }
    with in_their_words(names):
        return params_over(defaults, {**given, **others})


@contextmanager
def in_their_words(names: Mapping[str, str]) -> Iterator[None]:
    """Gives errors about a field the name that the API has for it; `names` as in `params_of`."""
    try:
        yield
    except ClientError as error:
        for theirs, ours in names.items():
            if error.param == ours:
                error.param = theirs
                error.message = error.message.replace(f"{ours}:", f"{theirs}:", 1)
                break
        raise
