"""The engine requests behind one HTTP request: one stream for each prompt, awaited and aborted
together.

Reports each finished request to the metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import InvalidRequest, WorkerFailed
from octavo.api.outputs import RequestOutput
from octavo.api.pooling_params import RequestParams
from octavo.frontend.arguments import Prompt as EnginePrompt
from octavo.frontend.input_processor import DEFAULT_CONTEXT, ParentRequest, RequestContext
from octavo.frontend.prompt_inputs import Truncation
from octavo.frontend.streams import RequestStream
from octavo.server.images import has_images
from octavo.server.roles import fit_roles
from octavo.server.state.served_model import ServedModel
from octavo.text.ports import DEFAULT_RENDERING, Rendering
from octavo.text.unicode import LONG_TEXT_CHARACTERS

Prompt = str | list[int]

PLAIN_MESSAGE = {"role", "content"}
"""Fields of a message that contains only text."""
MARKS_CHARACTERS = 200
"""Number of characters whose tokenization takes as long as rendering one message."""


class OutputStreams:
    """The streams of one HTTP request. The constructor submits the requests and raises ClientError
    if they are invalid.
    """

    def __init__(
        self,
        model: ServedModel,
        prompts: Sequence[EnginePrompt],
        params: RequestParams,
        name: str,
        *,
        origin: RequestContext = DEFAULT_CONTEXT,
        deltas: bool = False,
        is_part: bool = False,
    ) -> None:
        """Submits all prompts. With `deltas`, `outputs` yields only new output. With `is_part`, the
        request is already counted as running.
        """
        self._params = params
        self._metrics = model.metrics
        self._record = model.record
        self._streams: list[RequestStream] = []
        model.limits.check(len(prompts), params)
        if not is_part:
            self._record.start()
        self._is_part = is_part
        self._has_ended = False
        try:
            for index, prompt in enumerate(prompts):
                stream = model.llm.submit(
                    prompt,
                    params,
                    member_name(name, index),
                    priority=origin.priority,
                    tenant=origin.tenant,
                    owner=origin.owner,
                    adapter=model.adapter,
                    deltas=deltas,
                    admit=self._admit,
                )
                self._streams.append(stream)
        except BaseException:
            self._abort()
            raise

    @classmethod
    def of_request(
        cls, model: ServedModel, request: ParentRequest, *, deltas: bool
    ) -> OutputStreams:
        """Submits a prepared request."""
        name, params = request.request_id, request.sampling_params
        return cls.of_requests(model, [request], params, name, deltas=deltas)

    @classmethod
    def of_requests(
        cls,
        model: ServedModel,
        requests: Sequence[ParentRequest],
        params: RequestParams,
        name: str,
        *,
        deltas: bool = False,
        is_part: bool = False,
    ) -> OutputStreams:
        """Submits prepared requests that have the same params."""
        streams = cls(model, [], params, name, is_part=is_part)
        try:
            for request in requests:
                stream = model.llm.submit_prepared(request, deltas=deltas, admit=streams._admit)
                streams._streams.append(stream)
        except BaseException:
            streams._abort()
            raise
        return streams

    async def results(self) -> list[RequestOutput]:
        """Returns the final outputs in the order of the prompts; cancellation aborts them."""
        try:
            return [self._check(await stream.final()) for stream in self._streams]
        finally:
            self._abort()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields (prompt index, output) on each change; closing it aborts the rest. With `deltas`
        an output contains only new tokens and text.
        """
        try:
            if len(self._streams) == 1:
                async for output in self._streams[0]:
                    yield 0, self._check(output)
                return
            async for index, output in _merge(self._streams):
                yield index, self._check(output)
        finally:
            self._abort()

    def _check(self, output: RequestOutput) -> RequestOutput:
        if output.finished:
            self._metrics.observe(output, self._params)
            self._record.end(output)
            if output.error is not None:
                raise WorkerFailed(output.error)
        return output

    def _admit(self, request: ParentRequest) -> None:
        """Charges a prompt before it runs; raises an error if the key's token limit is exceeded."""
        self._record.charge_prompt(len(request.prompt_token_ids))

    def _abort(self) -> None:
        """Aborts unfinished streams and charges their generated tokens; the request is no longer
        counted as running.
        """
        if self._has_ended:
            return
        self._has_ended = True
        if not self._is_part:
            self._record.stop()
        for stream in self._streams:
            stream.abandon()
            if stream.lost is not None:
                self._metrics.observe_abort(stream.lost, self._params)
                self._record.charge(stream.lost.metrics.num_generation_tokens)


def member_name(name: str, index: int) -> str:
    """Returns the engine's request id of a prompt of an HTTP request."""
    return f"{name}-{index}"


def split_member(request_id: str) -> tuple[str, int]:
    """Splits an id made by `member_name` into the HTTP request and the prompt's index."""
    name, _, index = request_id.rpartition("-")
    return (name, int(index)) if index.isdecimal() else (request_id, 0)


async def make_prompt(
    llm: AsyncLLM,
    prompt: Prompt,
    *,
    add_special_tokens: bool = True,
    cache_salt: str | None = None,
    truncation: Truncation | None = None,
) -> EnginePrompt:
    """Builds an engine prompt; long texts are tokenized in a thread."""
    if not isinstance(prompt, str):
        ids = {"prompt_token_ids": prompt, "cache_salt": cache_salt}
        return ids if truncation is None else await llm.tokenize(ids, truncation=truncation)
    return await llm.tokenize(
        {"prompt": prompt, "cache_salt": cache_salt},
        add_special_tokens=add_special_tokens,
        truncation=truncation,
    )


async def make_chat_prompt(
    llm: AsyncLLM,
    messages: list[dict[str, Any]],
    *,
    cache_salt: str | None,
    rendering: Rendering = DEFAULT_RENDERING,
    truncation: Truncation | None = None,
) -> dict[str, Any]:
    """Renders a conversation with the chat template, in a thread if that may take long."""
    messages = fit_messages(llm, messages, rendering)
    if _is_quick(messages, rendering):
        prompt = llm.chat_prompt(messages, rendering, truncation)
    else:
        prompt = await asyncio.to_thread(llm.chat_prompt, messages, rendering, truncation)
    return prompt | {"cache_salt": cache_salt}


def fit_messages(
    llm: AsyncLLM, messages: list[dict[str, Any]], rendering: Rendering
) -> list[dict[str, Any]]:
    """Adapts a conversation to the role sequence that the template accepts."""
    if llm.config.model.skip_tokenizer_init:
        return messages
    return fit_roles(messages, llm.get_tokenizer().get_role_rules(rendering))


def _is_quick(messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> bool:
    """Returns whether a conversation is short and plain, so that rendering it is faster than
    starting a thread.
    """
    if rendering.template is not None or rendering.variables or has_images(messages):
        return False
    if any(message.keys() != PLAIN_MESSAGE for message in messages):
        return False  # tool calls and results, which may be long
    length = sum(MARKS_CHARACTERS + len(message["content"] or "") for message in messages)
    return length <= LONG_TEXT_CHARACTERS


def as_prompts(value: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """Returns the prompts of a completions body, which may contain one or several."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise InvalidRequest(
            "prompt: got an empty list, expected at least one prompt", param="prompt"
        )
    if all(isinstance(item, int) for item in value):
        return [value]  # type: ignore[list-item]
    return list(value)  # type: ignore[arg-type]


async def _merge(
    streams: Sequence[RequestStream],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yields the outputs of several streams as they arrive.

    A stream's next output is awaited only after its previous one was consumed.
    """
    pending = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                output = task.result()
                if not output.finished:
                    pending[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for task in pending:
            task.cancel()
