"""Texts that are pooled, checked once and turned into EngineRequests; a user's fault ends here.

Owns what the model's pooled rows are; prompts are read and measured by the input processor. Any
thread may call it at any time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import msgspec

from octavo.engine.front.arguments import Prompt
from octavo.engine.front.input_processor import (
    DEFAULT_ORIGIN,
    FrontRequest,
    InputProcessor,
    Origin,
)
from octavo.engine.requests.request import EngineRequest
from octavo.errors import InvalidRequest
from octavo.pooling_params import MODEL_LIMIT, PoolingParams, PoolingTask


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
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    dimensions: tuple[int, ...] = ()
    """Widths to which an embedding may be cut, as the checkpoint says."""


@dataclass(frozen=True, slots=True)
class PoolingInputs:
    """Turns texts and PoolingParams into FrontRequests."""

    pools: Pools
    inputs: InputProcessor

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        origin: Origin = DEFAULT_ORIGIN,
    ) -> FrontRequest:
        """Checks a request and tokenizes its prompt."""
        origin = self.inputs.checked_origin(origin)
        params = self._resolved(params)
        text, token_ids = self._read(prompt, params)
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
        )
        return FrontRequest(
            request_id=request_id,
            prompt=text,
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
        if params.dimensions is not None and params.dimensions not in (*pools.dimensions,):
            allowed = ", ".join(map(str, pools.dimensions)) or f"{pools.width}, the model's own"
            if params.dimensions != pools.width:
                raise InvalidRequest(
                    f"dimensions: got {params.dimensions}, allowed are {allowed}",
                    hint="a model declares by `matryoshka_dimensions` how it may be cut",
                    param="dimensions",
                )
        embeds = pools.task == "embed"
        normalize = pools.normalize if params.normalize is None else params.normalize
        activation = params.activation or pools.activation
        return msgspec.structs.replace(
            params,
            normalize=embeds and normalize,
            activation="none" if embeds else activation,
        )

    def _read(self, prompt: Prompt, params: PoolingParams) -> tuple[str | None, list[int]]:
        """Returns a prompt's text and its token ids, cut where the params say so."""
        if self.pools.lower_case:
            prompt = _lower(prompt)
        limit = params.truncate_prompt_tokens
        text, token_ids, _ = self.inputs.read_prompt(prompt, may_be_long=limit is not None)
        most = self.inputs.limits.prompts.most_tokens(params.num_needed_tokens)
        if limit is None or limit == MODEL_LIMIT:
            limit = len(token_ids) if limit is None else most
        elif limit > most:
            raise InvalidRequest(
                f"truncate_prompt_tokens: got {limit}, allowed are 1 to {most}, or -1 for {most}",
                param="truncate_prompt_tokens",
            )
        if len(token_ids) <= limit:
            return text, token_ids
        return text, self._cut(text, token_ids, limit)

    def _cut(self, text: str | None, token_ids: list[int], limit: int) -> list[int]:
        """Returns `limit` tokens, with the special ones that stand around a text in their places.
        Token ids without a text are cut at their end.
        """
        if text is None:
            return token_ids[:limit]
        own = self.inputs.encode_plain(text)
        num_special = len(token_ids) - len(own)
        first = next(at for at in range(num_special + 1) if token_ids[at : at + len(own)] == own)
        if limit < num_special:
            raise InvalidRequest(
                f"truncate_prompt_tokens: got {limit}, allowed are at least {num_special}: the"
                " special tokens around a text",
                param="truncate_prompt_tokens",
            )
        kept = own[: limit - num_special]
        return [*token_ids[:first], *kept, *token_ids[first + len(own) :]]


def _lower(prompt: Prompt) -> Prompt:
    """Returns a prompt whose text is in lower case; token ids stay."""
    if isinstance(prompt, str):
        return prompt.lower()
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
        return {**prompt, "prompt": prompt["prompt"].lower()}
    return prompt
