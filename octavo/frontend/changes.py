"""Validates changes and forks of requests that run or have just finished.

Converts ParentRequests to ParentRequests; raises InvalidRequest for invalid values. The core
applies the changes between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.api.errors import InvalidRequest, shown
from octavo.api.sampling_options import whole_number
from octavo.api.sampling_params import SamplingParams
from octavo.engine.protocol.requests import BACKGROUND_PRIORITY
from octavo.frontend.arguments import as_list
from octavo.frontend.input_processor import (
    DEFAULT_CONTEXT,
    InputProcessor,
    ParentRequest,
    RequestContext,
)
from octavo.frontend.output_processor import RequestState
from octavo.frontend.params_resolver import need_tokenizer


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """New values for a waiting or running request; None leaves a field unchanged."""

    max_tokens: int | None = None
    priority: int | None = None
    stop: str | list[str] | None = None
    """Stop texts that replace the current ones; [] for none."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Description of a request that continues another one from a certain token."""

    request_id: str
    index: int = 0
    """Index of the parent's sample."""
    keep: int | None = None
    """Number of the sample's tokens that the fork keeps; None for all."""
    then: str | Sequence[int] = ()
    """Tokens or text to append after the kept tokens."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that differ from the parent's."""
    origin: RequestContext = DEFAULT_CONTEXT


# -- changes ---------------------------------------------------------------------------------------


def changed(inputs: InputProcessor, state: RequestState, update: RequestUpdate) -> ParentRequest:
    """Returns the request with new values; raises InvalidRequest if a value is out of range."""
    request, params = state.request, state.request.sampling_params
    fields: dict[str, Any] = {}
    if update == RequestUpdate():
        raise InvalidRequest("got no change, expected one of max_tokens, priority, stop")
    if update.max_tokens is not None:
        fields["max_tokens"] = _max_tokens(inputs, state, update.max_tokens)
    if update.stop is not None:
        fields["stop"] = update.stop
    if params.beam_width is not None and fields:
        name = next(iter(fields))
        raise InvalidRequest(
            f"{name}: cannot be changed for a beam search; only priority can", param=name
        )
    params = inputs.params.resolve(_with(params, fields))
    origin = request.origin
    if update.priority is not None:
        origin = _with_priority(inputs, origin, update.priority)
    replaced = msgspec.structs.replace
    samples = [
        replaced(one, params=replaced(one.params, **fields), priority=origin.priority)
        for one in request.samples
    ]
    return replace(request, params=params, origin=origin, samples=samples)


def _with_priority(inputs: InputProcessor, origin: RequestContext, priority: int) -> RequestContext:
    """Returns the context with another priority. Background requests remain background requests and
    others do not become any, since policies account for the two separately.
    """
    if BACKGROUND_PRIORITY in (origin.priority, priority) and origin.priority != priority:
        raise InvalidRequest(
            f"priority: got {shown(priority)}, cannot be changed from or to the background"
            f" priority",
            param="priority",
        )
    return inputs.checked_origin(replace(origin, priority=priority))


def _max_tokens(inputs: InputProcessor, state: RequestState, value: int) -> int:
    """Returns the new maximum length; raises InvalidRequest if it is below the generated length or
    beyond the context.
    """
    num_prompt = len(state.request.samples[0].prompt_token_ids)
    lowest = max(1, state.num_output_tokens)
    highest = inputs.limits.prompts.max_num_tokens(num_prompt) - num_prompt
    number = whole_number(value)
    if number is None or not lowest <= number <= highest:
        raise InvalidRequest(
            f"max_tokens: got {shown(value)}, expected {lowest} to {highest}:"
            f" {state.num_output_tokens} tokens are generated already, and {highest} fit after a"
            f" prompt of {num_prompt}",
            param="max_tokens",
        )
    return number


# -- forks -----------------------------------------------------------------------------------------


def forked(inputs: InputProcessor, state: RequestState, fork: Fork) -> ParentRequest:
    """Returns a request that continues another one from a certain token and shares its blocks.

    Its params are the parent's with `fork.changes`; it gets a new seed unless these set one. Its
    prompt consists of the kept tokens and the added ones.
    """
    parent, params = state.request, state.request.sampling_params
    if params.beam_width is not None or params.is_ranked:
        raise InvalidRequest(
            "fork: not supported with beam search or best_of above n; their samples are known only"
            " at the end"
        )
    if parent.samples[0].encoder_input is not None:
        raise InvalidRequest(
            "fork: requires a decoder-only model, got an encoder-decoder",
            hint="use n for several samples",
        )
    kept = _kept(state, fork)
    prompt_ids = [*parent.prompt_token_ids, *kept, *_following(inputs, fork.then)]
    num_added = len(prompt_ids) - len(parent.prompt_token_ids)
    forked_request = inputs.process(
        fork.request_id,
        {"prompt_token_ids": prompt_ids, "cache_salt": parent.samples[0].cache_salt},
        _fork_params(params, num_added, fork.changes),
        fork.origin,
        adapter=parent.samples[0].adapter,
    )
    sample = parent.samples[fork.index]
    forked_request.samples[0] = msgspec.structs.replace(
        forked_request.samples[0], media=sample.media, pixels=sample.pixels
    )
    _continue_grammar(
        inputs, parent, forked_request, prompt_ids[len(parent.prompt_token_ids) :], fork
    )
    if state.samples[fork.index].finish_reason is None:
        forked_request.samples[0] = msgspec.structs.replace(
            forked_request.samples[0],
            fork_of=sample.request_id,
            fork_tokens=len(parent.prompt_token_ids) + len(kept),
        )
    return forked_request


def _continue_grammar(
    inputs: InputProcessor,
    parent: ParentRequest,
    forked_request: ParentRequest,
    added: Sequence[int],
    fork: Fork,
) -> None:
    """Advances the grammar of `forked_request` to its position; raises InvalidRequest if it cannot
    continue there.
    """
    spec, before = forked_request.samples[0].grammar, parent.samples[0].grammar
    if spec is None or before is None or "structured_outputs" in fork.changes:
        return
    num_given = before.num_given_tokens + len(added)
    output_ids = forked_request.prompt_token_ids[len(forked_request.prompt_token_ids) - num_given :]
    if not inputs.continues(spec, output_ids):
        raise InvalidRequest(
            "fork: the text of keep and then does not match the request's structured output",
            param="then",
        )
    forked_request.samples[0] = msgspec.structs.replace(
        forked_request.samples[0], grammar=msgspec.structs.replace(spec, num_given_tokens=num_given)
    )


def _kept(state: RequestState, fork: Fork) -> list[int]:
    index = whole_number(fork.index)
    num_samples = len(state.samples)
    if index is None or not 0 <= index < num_samples:
        raise InvalidRequest(
            f"index: got {shown(fork.index)}, expected 0 to {num_samples - 1}", param="index"
        )
    token_ids = state.samples[index].token_ids
    if fork.keep is None:
        return list(token_ids)
    number = whole_number(fork.keep)
    if number is None or not 0 <= number <= len(token_ids):
        raise InvalidRequest(
            f"keep: got {shown(fork.keep)}, expected 0 to {len(token_ids)}, the tokens"
            " generated so far",
            param="keep",
        )
    return token_ids[:number]


def _following(inputs: InputProcessor, then: str | Sequence[int]) -> list[int]:
    """Returns the token ids to append to the kept tokens."""
    if isinstance(then, str):
        tokenizer = need_tokenizer(
            inputs.tokenizer, "then: a string requires a tokenizer, got none", "then"
        )
        return tokenizer.encode(then, add_special_tokens=False) if then else []
    items = as_list(then)
    if items is None or any(whole_number(one) is None for one in items):
        raise InvalidRequest(
            f"then: got {shown(then)}, expected a string or a list of token ids", param="then"
        )
    inputs.params.check_ids("then", items)
    return items


def _fork_params(
    params: SamplingParams, num_added: int, changes: Mapping[str, Any]
) -> SamplingParams:
    """Returns the parent's params for the remaining length, with `changes` applied."""
    left = None if params.max_tokens is None else max(1, params.max_tokens - num_added)
    min_tokens = max(0, params.min_tokens - num_added)
    rest = {
        "n": 1,
        "best_of": None,
        "seed": None,
        "max_tokens": left,
        "min_tokens": min_tokens if left is None else min(left, min_tokens),
        "prompt_logprobs": None,
        "prompt_logprob_start": None,
    }
    return SamplingParams(**{**msgspec.structs.asdict(params), **rest, **changes})


def _with(params: SamplingParams, fields: Mapping[str, Any]) -> SamplingParams:
    return msgspec.structs.replace(params, **fields)
