"""Texts that are pooled, checked once and turned into EngineRequests; a user's fault ends here.

Owns what the model's pooled rows are; prompts are read and measured by the input processor. Any
thread may call it at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from octavo.engine.front.arguments import PoolingPrompt, Prompt
from octavo.engine.front.input_processor import (
    DEFAULT_ORIGIN,
    FrontRequest,
    InputProcessor,
    Origin,
)
from octavo.engine.front.params_resolver import need_tokenizer
from octavo.engine.requests.request import EngineRequest
from octavo.errors import InvalidRequest, shown
from octavo.pooling_params import (
    MODEL_LIMIT,
    PoolingActivation,
    PoolingParams,
    PoolingTask,
    TextPair,
)


@dataclass(frozen=True, slots=True)
class Pools:
    """The pooled rows of one model, and what its checkpoint says is made of them."""

    task: PoolingTask
    program: str
    """Name of the Program that pools."""
    width: int
    normalize: bool
    lower_case: bool
    """Whether texts are put into lower case before they are tokenized."""
    prefix: str = ""
    """Text that is put before each text of which an embedding is made."""
    has_segments: bool = False
    """Whether the model reads which of two texts a token belongs to."""
    activation: PoolingActivation = "none"
    """Function that a classifier's scores go through, unless a request names another."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels."""
    pair_template: str | None = None
    """Jinja template of a pair of texts, for a tokenizer whose chat template reads none; "" where
    only such a chat template will do, None where special tokens stand between the texts.
    """
    dimensions: Sequence[int] = ()
    """Widths to which an embedding may be cut, as the checkpoint says."""


class ReadPrompt(NamedTuple):
    """A prompt as tokens."""

    token_ids: list[int]
    text: str | None = None
    """Text that the token ids came from, where it is one text."""
    second_start: int | None = None
    """Index of the first token of the second segment; None where there is one segment only."""


@dataclass(frozen=True, slots=True)
class PoolingInputs:
    """Turns texts and PoolingParams into FrontRequests."""

    pools: Pools
    inputs: InputProcessor

    def process(
        self,
        request_id: str,
        prompt: PoolingPrompt,
        params: PoolingParams,
        origin: Origin = DEFAULT_ORIGIN,
    ) -> FrontRequest:
        """Checks a request and tokenizes its prompt."""
        origin = self.inputs.checked_origin(origin)
        params = self._resolved(params)
        if isinstance(prompt, TextPair):
            read = self._read_pair(prompt, self._limit(params))
        else:
            read = self._read(prompt, self._limit(params))
        token_ids = read.token_ids
        self.inputs.check_prompt(token_ids, num_needed=params.num_needed_tokens)
        arrival_time = time.monotonic()
        request = EngineRequest(
            self.inputs.next_core_id(),
            token_ids,
            params,
            seed=0,
            priority=origin.priority,
            tenant=origin.tenant,
            arrival_time=arrival_time,
            program=self.pools.program,
            second_start=read.second_start,
        )
        return FrontRequest(
            request_id=request_id,
            prompt=read.text,
            prompt_token_ids=token_ids,
            params=params,
            samples=[request],
            arrival_time=arrival_time,
            origin=origin,
        )

    def _resolved(self, params: PoolingParams) -> PoolingParams:
        """Returns the params with the checkpoint's own values where they name none; they are
        checked as when they were made, too.
        """
        params = msgspec.structs.replace(params)
        pools = self.pools
        embeds = pools.task == "embed"
        for name in ("activation",) if embeds else ("dimensions", "normalize"):
            if getattr(params, name) is not None:
                what = "an embedding" if embeds else "a classifier's scores"
                raise InvalidRequest(
                    f"{name}: got {shown(getattr(params, name))}, which {what} cannot have",
                    hint="leave it out",
                    param=name,
                )
        if embeds:
            self._check_dimensions(params.dimensions)
        normalize = pools.normalize if params.normalize is None else params.normalize
        return msgspec.structs.replace(
            params,
            normalize=embeds and normalize,
            activation=params.activation or pools.activation,
        )

    def _check_dimensions(self, wanted: int | None) -> None:
        """Raises InvalidRequest for a width to which the model's embeddings cannot be cut."""
        pools = self.pools
        if wanted is None or wanted == pools.width or wanted in pools.dimensions:
            return
        if isinstance(pools.dimensions, range):
            allowed = f"1 to {pools.width}"
        else:
            allowed = ", ".join(map(str, sorted({*pools.dimensions, pools.width})))
        raise InvalidRequest(
            f"dimensions: got {wanted}, allowed are {allowed}",
            hint="a model declares by `matryoshka_dimensions` how its embeddings may be cut",
            param="dimensions",
        )

    def _limit(self, params: PoolingParams) -> int | None:
        """Returns the number of tokens that a prompt is cut to; None where it is not cut."""
        limit = params.truncate_prompt_tokens
        most = self.inputs.limits.prompts.most_tokens(params.num_needed_tokens)
        if limit == MODEL_LIMIT:
            return most
        if limit is not None and limit > most:
            raise InvalidRequest(
                f"truncate_prompt_tokens: got {limit}, allowed are 1 to {most}, or -1 for {most}",
                param="truncate_prompt_tokens",
            )
        return limit

    def _read(self, prompt: Prompt, limit: int | None) -> ReadPrompt:
        """Returns a prompt's tokens and its text, cut to the limit."""
        if self.pools.task == "embed" and self.pools.prefix:
            prompt = _changed(prompt, lambda text: self.pools.prefix + text)
        if self.pools.lower_case:
            prompt = _changed(prompt, str.lower)
        text, token_ids, _ = self.inputs.prompts.read_prompt(prompt, may_be_long=limit is not None)
        if limit is None or len(token_ids) <= limit:
            return ReadPrompt(token_ids, text)
        return ReadPrompt(self._cut(text, token_ids, limit), text)

    def _read_pair(self, pair: TextPair, limit: int | None) -> ReadPrompt:
        """Returns the tokens of two texts, cut to the limit from the longer text first."""
        if self.pools.task != "classify":
            raise InvalidRequest(
                "prompt: got a pair of texts, allowed is one: an embedding is made of each text",
                param="prompt",
            )
        for text in (pair.first, pair.second):
            _check_half(text)
        if self.pools.lower_case:
            pair = replace(pair, first=pair.first.lower(), second=pair.second.lower())
        if limit is None and pair.max_second_tokens is None:
            self.inputs.prompts.check_length(pair.first, pair.second)
        tokenizer = need_tokenizer(
            self.inputs.tokenizer, "a pair of texts needs a tokenizer", "prompt"
        )
        encoded = tokenizer.encode_pair(pair, max_tokens=limit, template=self.pools.pair_template)
        if limit is not None and limit < encoded.num_fixed:
            raise _below_special(limit, encoded.num_fixed)
        segments = encoded.type_ids if self.pools.has_segments else []
        return ReadPrompt(encoded.token_ids, second_start=_second_start(segments))

    def _cut(self, text: str | None, token_ids: list[int], limit: int) -> list[int]:
        """Returns `limit` tokens, with the special ones that stand around a text in their places.
        Token ids without a text are cut at their end.
        """
        if text is None:
            return token_ids[:limit]
        own = self.inputs.prompts.encode_plain(text)
        num_special = len(token_ids) - len(own)
        first = next(at for at in range(num_special + 1) if token_ids[at : at + len(own)] == own)
        if limit < num_special:
            raise _below_special(limit, num_special)
        kept = own[: limit - num_special]
        return [*token_ids[:first], *kept, *token_ids[first + len(own) :]]


def _check_half(text: object) -> None:
    """Raises InvalidRequest where one of a pair's texts is none."""
    if not isinstance(text, str):
        raise InvalidRequest(
            f"prompt: got {shown(text)} in a pair, allowed are two texts", param="prompt"
        )


def _second_start(type_ids: list[int]) -> int | None:
    """Returns where the second segment starts; None where there is none."""
    if 1 not in type_ids:
        return None
    start = type_ids.index(1)
    if type_ids[start:].count(1) != len(type_ids) - start:
        raise InvalidRequest(
            "prompt: the tokenizer arranges a pair in segments that are not one after the other,"
            " which is not supported",
            param="prompt",
        )
    return start


def _below_special(limit: int, num_special: int) -> InvalidRequest:
    return InvalidRequest(
        f"truncate_prompt_tokens: got {limit}, allowed are at least {num_special}: the tokens that"
        " stand around a text",
        param="truncate_prompt_tokens",
    )


def _changed(prompt: Prompt, change: Callable[[str], str]) -> Prompt:
    """Returns a prompt whose text is changed; token ids stay."""
    if isinstance(prompt, str):
        return change(prompt)
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": change(prompt["prompt"])}
    return prompt
