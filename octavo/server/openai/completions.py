"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from msgspec import UnsetType

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import InvalidRequest
from octavo.api.outputs import Logprob, RequestOutput
from octavo.api.sampling_params import SamplingParams
from octavo.frontend.arguments import Prompt as EnginePrompt
from octavo.server.http.auth import get_request_context
from octavo.server.http.body import parse_body
from octavo.server.http.sse import EventStream
from octavo.server.openai.bodies import CompletionBody
from octavo.server.openai.formatter import OpenAIFormatter, format_usage
from octavo.server.openai.logprobs import TextOffsets, completion_logprobs, plain_logprobs
from octavo.server.openai.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from octavo.server.openai.sampling import sampling_params
from octavo.server.openai.truncation import parse_truncation
from octavo.server.output_streams import Prompt, as_prompts, make_prompt
from octavo.server.response_builder import (
    ChoiceDelta,
    ResponseBuilder,
    send_response,
    start_response,
)
from octavo.server.state.served_model import ServedModel
from octavo.server.state.service import Service, get_service
from octavo.text.detokenizer import decode_whole_characters, skipped_ids

PATH = "/v1/completions"
DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post(PATH)
async def complete(
    request: Request,
    service: Annotated[Service, Depends(get_service)],
    body: Annotated[CompletionBody, Depends(parse_body(CompletionBody))],
) -> Response:
    model = await service.model(body.model)
    llm = model.llm
    _check(body)
    params = _params(body, llm.get_default_sampling_params())
    prompts = await _prompts(body, llm)
    formatter = CompletionFormatter(body, params, model)
    origin = get_request_context(request, body.priority, body.user)
    response = await start_response(
        model, prompts, params, formatter, origin=origin, stream=bool(body.stream)
    )
    return await send_response(request, response, formatter, EventStream if body.stream else None)


class CompletionFormatter(OpenAIFormatter):
    prefix = "cmpl"

    def __init__(self, body: CompletionBody, params: SamplingParams, model: ServedModel) -> None:
        super().__init__(body, params, model)
        self._echo = body.echo
        listed = params.logprob_token_ids is not None
        self._num_logprobs = params.num_shown_logprobs if listed else body.logprobs
        self._hidden_ids: Collection[int] = ()
        if model.tokenizer is not None:
            self._hidden_ids = skipped_ids(model.tokenizer, params)
        self._only_prompt = body.max_tokens == 0
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._offsets: dict[int, TextOffsets] = {}
        """Text offsets of each choice's tokens, independent of chunks."""

    def format_whole(self, response: ResponseBuilder, choices: Sequence[ChoiceDelta]) -> Completion:
        usage = format_usage(response.usage, 0 if self._only_prompt else None)
        completion = self.format_chunk([self._choice(choice) for choice in choices], usage)
        completion.timings = self.timings(response)
        return completion

    def format_chunk(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            self.id,
            "text_completion",
            self.created,
            self.model,
            choices,
            self.fingerprint,
            usage=usage,
        )

    def add_prompt(self, completion: Completion, output: RequestOutput) -> None:
        """Does nothing: each choice contains the fields about its own prompt."""

    def format_choices(self, delta: ChoiceDelta) -> list[CompletionChoice]:
        return [self._choice(delta)]

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        if self._only_prompt:
            delta = replace(
                delta,
                text="",
                token_ids=[],
                logprobs=[],
                finish_reason="length",
                stop_reason=None,
                score=None,
            )
        output = delta.output
        echoed = self._prompt_text(output) if self._echo else ""
        choice = CompletionChoice(
            delta.index,
            echoed + delta.text if delta.is_first else delta.text,
            self._logprobs(delta, echoed),
            delta.finish_reason,
            delta.stop_reason,
        )
        if delta.score is not None:
            choice.score = delta.score
        if self.returns_token_ids:
            choice.token_ids = delta.token_ids
        if delta.is_first and self.returns_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if delta.is_first:
            choice.prompt_text = self.prompt_text(output)
        if delta.is_first and self._prompt_logprobs:
            choice.prompt_logprobs = plain_logprobs(output.prompt_logprobs)
        return choice

    def _logprobs(self, delta: ChoiceDelta, echoed: str) -> CompletionLogprobs | None:
        if self._num_logprobs is None or delta.logprobs is None:
            return None
        index, output = delta.index, delta.output
        if index not in self._offsets:
            prompt = () if self._echo else output.prompt_token_ids
            self._offsets[index] = TextOffsets(self.tokenizer, self._hidden_ids, prompt)
        text_offsets = self._offsets[index]
        token_ids = delta.token_ids
        offsets: list[int] = []
        steps: list[dict[int, Logprob] | None] = [*delta.logprobs]
        if self._echo and delta.is_first:
            offsets = text_offsets.add_echo(echoed, output.prompt_token_ids)
            token_ids = output.prompt_token_ids + token_ids
            steps = [*(output.prompt_logprobs or []), *steps]
        offsets = [*offsets, *text_offsets.add(delta.token_ids)]
        return completion_logprobs(token_ids, steps, self._num_logprobs, self.names, offsets)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self.tokenizer is None:
            return output.prompt or ""
        token_ids, skips = output.prompt_token_ids, self.params.skip_special_tokens
        if self._only_prompt:
            return self.tokenizer.decode(token_ids, skip_special_tokens=skips)
        # The completion's text begins with the character that the prompt ends in the middle of.
        return decode_whole_characters(self.tokenizer, token_ids, skip_special_tokens=skips)


def _check(body: CompletionBody) -> None:
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        message = (
            f"best_of: got {body.best_of} with stream, expected the value of n ({body.n or 1}):"
            " the best samples are known only at the end"
        )
        raise InvalidRequest(message, param="best_of")
    if body.max_tokens == 0 and (not body.echo or body.stream):
        raise InvalidRequest(
            "max_tokens: got 0, requires echo and no stream",
            param="max_tokens",
            hint="set echo to true and omit stream",
        )


async def _prompts(body: CompletionBody, llm: AsyncLLM) -> list[EnginePrompt]:
    embeds = body.prompt_embeds or []
    embeds = [embeds] if isinstance(embeds, str) else embeds
    if body.prompt is None and not embeds:
        raise InvalidRequest("prompt: field required", param="prompt")
    prompts: list[EnginePrompt] = [
        await llm.tokenize({"prompt_embeds": one, "cache_salt": body.cache_salt}) for one in embeds
    ]
    if body.prompt is None or (embeds and not body.prompt):
        return prompts
    return prompts + [await _prompt(body, prompt, llm) for prompt in as_prompts(body.prompt)]


async def _prompt(body: CompletionBody, prompt: Prompt, llm: AsyncLLM) -> EnginePrompt:
    if body.suffix:
        if not isinstance(prompt, str):
            raise InvalidRequest(
                "suffix: got a prompt of token ids, expected a string", param="suffix"
            )
        return await llm.infill_prompt(prompt, body.suffix) | {"cache_salt": body.cache_salt}
    engine_prompt = await make_prompt(
        llm,
        prompt,
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt,
        truncation=parse_truncation(body, llm, _max_tokens(body)),
    )
    named = {
        "decoder_prompt": body.decoder_prompt,
        "decoder_prompt_token_ids": body.decoder_prompt_token_ids,
    }
    named_prompts = {name: value for name, value in named.items() if value is not None}
    if not named_prompts:
        return engine_prompt
    assert isinstance(engine_prompt, Mapping), "make_prompt returns a text's tokens in a dict"
    return {**engine_prompt, **named_prompts}


def _max_tokens(body: CompletionBody) -> int:
    """Returns max_tokens; -1 for no limit. 0 still runs one step."""
    return DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1


def _params(body: CompletionBody, defaults: SamplingParams) -> SamplingParams:
    """Returns the SamplingParams. `echo` with `logprobs` requires prompt logprobs."""
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is None and body.echo:
        # logprob_token_ids apply to the completion only; the echoed prompt has its own logprobs.
        prompt_logprobs = 0 if body.logprob_token_ids else body.logprobs
    others = {"prompt_logprobs": prompt_logprobs, "best_of": body.best_of}
    return sampling_params(
        body, defaults, max_tokens=_max_tokens(body), logprobs=body.logprobs, **others
    )
