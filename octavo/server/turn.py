"""One answer to a conversation, in no API's form: what the routes of every chat dialect build on.

A route turns its body into a `Conversation` and SamplingParams, starts a `Turn`, and gives the
turn's deltas or its whole output the form that its clients expect.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from octavo.engine.front.input_processor import DEFAULT_ORIGIN, Origin, Truncation
from octavo.outputs import RequestOutput
from octavo.ports import DEFAULT_RENDERING, Rendering
from octavo.sampling_params import SamplingParams
from octavo.server.connection import unless_gone
from octavo.server.deltas import Cursor, Delta
from octavo.server.generation import Generation, chat_prompt_of
from octavo.server.state.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat request and how the model's template is to render them."""

    messages: list[dict[str, Any]]
    """Messages with at least `role` and a `content` of plain text."""
    cache_salt: str | None = None
    rendering: Rendering = DEFAULT_RENDERING
    truncation: Truncation | None = None

    async def prompt(self, model: ServedModel) -> dict[str, Any]:
        """Returns the prompt's token ids, as the engine takes them."""
        return await chat_prompt_of(
            model.llm,
            self.messages,
            cache_salt=self.cache_salt,
            rendering=self.rendering,
            truncation=self.truncation,
        )


class Turn:
    """The answer of one sample to a conversation, whole or as it grows."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.latest: RequestOutput | None = None
        """Newest output, whose counts are the usage so far; None before the first token."""

    async def whole(self, receive: Receive) -> RequestOutput:
        """Returns the final output; aborts the request when its client goes."""
        (self.latest,) = await unless_gone(receive, self._generation.results())
        return self.latest

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields what the answer gains; the last has a finish_reason. Closing it aborts."""
        cursor = Cursor()
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                self.latest = output
                delta = cursor.advance(output.outputs[0], every_token=False)
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
    return Turn(Generation(model, [prompt], params, request_id, origin=origin, deltas=stream))
