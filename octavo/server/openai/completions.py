"""POST /v1/completions: text, texts or token ids in; continued text out, whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo.errors import InvalidRequest
from octavo.outputs import Logprob, RequestOutput
from octavo.ports import Tokenizer
from octavo.sampling_params import SamplingParams
from octavo.server.auth import origin_of
from octavo.server.body import body_of
from octavo.server.connection import unless_gone
from octavo.server.deltas import Delta
from octavo.server.generation import Generation, as_prompts, prompt_of
from octavo.server.openai.answer import Answer, usage_of, whole_of
from octavo.server.openai.logprobs import completion_logprobs, plain_logprobs
from octavo.server.openai.protocol import (
    Completion,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from octavo.server.openai.sampling import check_stream_options, sampling_params
from octavo.server.sse import EventStream
from octavo.server.state.service import Service, service_of

DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post("/v1/completions")
async def complete(
    request: Request,
    service: Annotated[Service, Depends(service_of)],
    body: Annotated[CompletionBody, Depends(body_of(CompletionBody))],
) -> Response:
    model = service.model(body.model)
    llm = model.llm
    _check(body)
    params = _params(body, llm.get_default_sampling_params())
    prompts = [
        await prompt_of(
            llm, prompt, add_special_tokens=body.add_special_tokens, cache_salt=body.cache_salt
        )
        for prompt in as_prompts(body.prompt)
    ]
    answer = CompletionAnswer(body, params, model.name, model.tokenizer)
    origin = origin_of(request, body.priority, body.user)
    generation = Generation(
        model, prompts, params, answer.id, origin=origin, deltas=bool(body.stream)
    )
    if body.stream:
        return EventStream(answer.events(generation), body.headers)
    outputs = await unless_gone(request.receive, generation.results())
    return Response(
        msgspec.json.encode(answer.whole(outputs)),
        headers=body.headers,
        media_type="application/json",
    )


class CompletionAnswer(Answer):
    """An answer in the form of text completions."""

    prefix = "cmpl"

    def __init__(
        self, body: CompletionBody, params: SamplingParams, model: str, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(body, params, model, tokenizer)
        self._tokenizer = tokenizer
        self._echo = body.echo
        self._num_logprobs = body.logprobs
        self._only_prompt = body.max_tokens == 0
        self._prompt_logprobs = body.prompt_logprobs is not None

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = [
            self._choice(self.choice_index(index, sample.index), whole_of(sample), output)
            for index, output in enumerate(outputs)
            for sample in output.outputs
        ]
        made = self.chunk(choices, self._usage(outputs))
        made.timings = self.timings(outputs)
        return made

    def chunk(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return Completion(self.id, "text_completion", self.created, self.model, choices, usage)

    def additions(self, index: int, delta: Delta, output: RequestOutput) -> list[CompletionChoice]:
        return [self._choice(index, delta, output)]

    def _choice(self, index: int, delta: Delta, output: RequestOutput) -> CompletionChoice:
        if self._only_prompt:
            delta = Delta("", 0, [], [], "length", None, is_first=delta.is_first)
        echoed = self._prompt_text(output) if self._echo else ""
        choice = CompletionChoice(
            index,
            echoed + delta.text if delta.is_first else delta.text,
            self._logprobs(delta, output, len(echoed)),
            delta.finish_reason,
            delta.stop_reason,
        )
        if delta.score is not None:
            choice.score = delta.score
        if self.returns_token_ids:
            choice.token_ids = delta.token_ids
        if delta.is_first and self.returns_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if delta.is_first and self._prompt_logprobs:
            choice.prompt_logprobs = plain_logprobs(output.prompt_logprobs)
        return choice

    def _logprobs(
        self, delta: Delta, output: RequestOutput, num_echoed: int
    ) -> CompletionLogprobs | None:
        if self._num_logprobs is None or delta.logprobs is None:
            return None
        token_ids, offset = delta.token_ids, num_echoed + delta.start
        steps: list[dict[int, Logprob] | None] = [*delta.logprobs]
        if self._echo and delta.is_first:
            token_ids, steps, offset = (
                output.prompt_token_ids + token_ids,
                [*(output.prompt_logprobs or []), *steps],
                0,
            )
        return completion_logprobs(token_ids, steps, self._num_logprobs, self.names, offset)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(
            output.prompt_token_ids, skip_special_tokens=self.params.skip_special_tokens
        )

    def _usage(self, outputs: Sequence[RequestOutput]) -> Usage:
        usage = usage_of(outputs)
        if self._only_prompt:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage


def _check(body: CompletionBody) -> None:
    check_stream_options(body)
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        message = (
            f"best_of: got {body.best_of} with stream, allowed is the value of n ({body.n or 1}):"
            " the best are known at the end"
        )
        raise InvalidRequest(message, param="best_of")
    if body.suffix:
        raise InvalidRequest("suffix: this server does not insert text", param="suffix")
    if body.max_tokens == 0 and (not body.echo or body.stream):
        raise InvalidRequest(
            "max_tokens: got 0, allowed only with echo and without stream", param="max_tokens"
        )
    if body.logprobs is not None and body.logprobs < 0:
        raise InvalidRequest(
            f"logprobs: got {body.logprobs}, allowed is a whole number from 0 up", param="logprobs"
        )


def _params(body: CompletionBody, defaults: SamplingParams) -> SamplingParams:
    """Returns the request's SamplingParams.

    `echo` with `logprobs` needs the prompt's logprobs too; max_tokens 0 still takes one step.
    """
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is None and body.echo:
        prompt_logprobs = body.logprobs
    others = {"prompt_logprobs": prompt_logprobs, "best_of": body.best_of}
    return sampling_params(body, defaults, max_tokens=max_tokens, logprobs=body.logprobs, **others)
