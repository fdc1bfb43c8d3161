"""Validation of SamplingParams: each field by its declaration, then rules across fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.api.errors import InvalidRequest, shown
from octavo.api.repetition_detection import parse_repetition_detection
from octavo.api.sampling_options import (
    INT32_MAX,
    MAX_BIAS,
    MAX_BREAKER,
    MAX_BREAKERS,
    MAX_LENGTH_PENALTY,
    MAX_LISTED,
    MAX_N,
    MAX_PROCESSORS,
    SamplingOptions,
    check,
    to_float,
    whole_number,
)
from octavo.api.stop_patterns import check_patterns
from octavo.api.structured_outputs import StructuredOutputs

Params = Any
"""SamplingParams; its module imports this one."""


def check_params(params: Params, options: SamplingOptions) -> None:
    """Validates and normalizes the fields; raises InvalidRequest for the first invalid one."""
    _check_values(params, options)
    _check_texts(params)
    _check_token_ids(params)
    _check_structure(params)
    if params.beam_width is not None:
        _check_beam_search(params, params.beam_width, options)
    elif params.is_greedy:
        _check_greedy(params, options)


def _check_values(params: Params, options: SamplingOptions) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is True:  # other APIs' spelling of 1
            setattr(params, name, 1)
    for option, value in zip(options.values(), options.get_values(params), strict=True):
        if value is not option.default:
            setattr(params, option.name, option.parse(value))
    if params.best_of is not None:
        best_of = whole_number(params.best_of)
        is_in_range = best_of is not None and params.n <= best_of <= MAX_N
        words = f"None, or an integer from n ({params.n}) to {MAX_N}"
        check("best_of", params.best_of, is_in_range, words)
        params.best_of = best_of
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        allowed = f"an integer from 0 to max_tokens ({params.max_tokens})"
        check("min_tokens", params.min_tokens, False, allowed)
    if params.prompt_logprob_start is not None and params.prompt_logprobs is None:
        raise InvalidRequest(
            "prompt_logprob_start: requires prompt_logprobs",
            param="prompt_logprob_start",
        )


def _check_texts(params: Params) -> None:
    if params.stop is not None:
        params.stop = _parse_texts(
            "stop", params.stop, "a string or a list of strings", allow_single=True
        )
    if params.stop_regex is not None:
        allowed = "a regular expression or a list of them"
        params.stop_regex = _parse_texts(
            "stop_regex", params.stop_regex, allowed, allow_single=True
        )
        check_patterns(params.stop_regex)
    if params.bad_words is not None:
        params.bad_words = _parse_texts("bad_words", params.bad_words, "a list of strings")
    if params.dry_sequence_breakers is not None:
        allowed = f"a list of at most {MAX_BREAKERS} texts of {MAX_BREAKER} characters"
        params.dry_sequence_breakers = _parse_breakers(params.dry_sequence_breakers, allowed)
    for name in ("stop", "stop_regex"):
        if getattr(params, name) and not params.detokenize:
            raise InvalidRequest(
                f"{name}: stop strings require detokenize=True",
                param=name,
                hint="use stop_token_ids",
            )


def _check_token_ids(params: Params) -> None:
    if params.stop_token_ids is not None:
        ids = _parse_token_ids("stop_token_ids", params.stop_token_ids)
        params.stop_token_ids = list(dict.fromkeys(ids))
    if params.allowed_token_ids is not None:
        ids = _parse_token_ids("allowed_token_ids", params.allowed_token_ids)
        check("allowed_token_ids", ids, len(ids) > 0, "a list of at least one token id")
        params.allowed_token_ids = ids
    if params.logprob_token_ids is not None:
        _set_logprob_token_ids(
            params, _parse_token_ids("logprob_token_ids", params.logprob_token_ids)
        )
    if params.logit_bias is not None:
        given: object = params.logit_bias
        check("logit_bias", given, isinstance(given, Mapping), "an object of token ids and numbers")
        params.logit_bias = {
            _parse_bias_token(key): _parse_bias(key, value)
            for key, value in params.logit_bias.items()
        }


def _set_logprob_token_ids(params: Params, ids: list[int]) -> None:
    """Sets `logprob_token_ids`, and `logprobs` to their number."""
    name = "logprob_token_ids"
    ok = 0 < len(ids) == len(set(ids)) <= MAX_LISTED
    check(name, ids, ok, f"a list of 1 to {MAX_LISTED} distinct token ids")
    words = f"None, or the number of logprob_token_ids ({len(ids)})"
    check("logprobs", params.logprobs, params.logprobs in (None, len(ids)), words)
    params.logprob_token_ids, params.logprobs = ids, len(ids)


def _check_structure(params: Params) -> None:
    if params.repetition_detection is not None:
        params.repetition_detection = parse_repetition_detection(params.repetition_detection)
    form: object = params.structured_outputs
    if isinstance(form, Mapping):
        form = params.structured_outputs = StructuredOutputs(**form)
    if params.logits_processors is not None:
        params.logits_processors = _parse_processors(params, params.logits_processors)
    if form is None:
        return
    ok = isinstance(form, StructuredOutputs)
    check("structured_outputs", form, ok, "None, or StructuredOutputs")
    if params.ignore_eos:
        raise InvalidRequest(
            "ignore_eos: not supported with structured_outputs, which stop at the end token",
            param="ignore_eos",
            hint="remove ignore_eos; max_tokens limits the length",
        )


def _parse_processors(params: Params, value: object) -> list[str] | None:
    """Returns the names of logits processors; None if there are none."""
    name = "logits_processors"
    names = _parse_texts(name, value, f"a list of at most {MAX_PROCESSORS} names")
    check(name, names, len(names) <= MAX_PROCESSORS, f"at most {MAX_PROCESSORS} names")
    for other in ("prompt_logprobs", "logprob_token_ids"):
        if names and getattr(params, other) is not None:
            raise InvalidRequest(
                f"{name}: got {shown(names)} with {other}, expected one of them",
                param=name,
                hint=f"remove {other}; logprobs are computed from the model's own logits",
            )
    return names or None


def _check_beam_search(params: Params, width: int, options: SamplingOptions) -> None:
    """Rejects options that a beam search does not support: it samples nothing and ranks by the
    model's unmodified logprobs.
    """
    check("n", params.n, params.n <= width, f"at most the beam_width ({width}) in a beam search")
    check(
        "best_of",
        params.best_of,
        params.best_of in (None, params.n),
        f"n ({params.n}) in a beam search",
        hint="beam_width sets the number of beams",
    )
    penalty, max_width = to_float(params.length_penalty), MAX_LENGTH_PENALTY
    check(
        "length_penalty",
        params.length_penalty,
        abs(penalty) <= max_width,
        f"a number from {-max_width:g} to {max_width:g}",
    )
    params.length_penalty = penalty
    check(
        "early_stopping",
        params.early_stopping,
        params.early_stopping in (True, False, "never"),
        "True, False or 'never'",
    )
    for name, allowed in options.beam_search_values.items():
        value = getattr(params, name)
        check(name, value, value in allowed, f"{allowed[0]!r} in a beam search")
    params.temperature = 0.0


def _check_greedy(params: Params, options: SamplingOptions) -> None:
    for name in ("n", "best_of"):
        value = getattr(params, name)
        if value not in (1, None):
            hint = "greedy samples are identical; set temperature above 0"
            check(name, value, False, "1 when the temperature is 0", hint=hint)
    for name, neutral in options.greedy_values.items():
        value = getattr(params, name)
        if value != neutral:
            hint = "set temperature above 0, or remove it"
            check(name, value, False, f"{neutral} when the temperature is 0", hint=hint)
    params.temperature = 0.0
    for name, neutral in options.ignored_by_greedy.items():
        setattr(params, name, neutral)


def _parse_texts(
    name: str, value: object, allowed: str, *, allow_single: bool = False
) -> list[str]:
    """Returns a list of non-blank texts; with `allow_single` a single text is allowed."""
    texts = [value] if allow_single and isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise InvalidRequest(f"{name}: got {shown(value)}, expected {allowed}", param=name)
    for text in texts:
        is_there = isinstance(text, str) and (text != "" if allow_single else text.strip() != "")
        check(name, text, is_there, f"{allowed}, none of them empty")
    return list(texts)


def _parse_breakers(value: Any, allowed: str) -> list[str]:
    name = "dry_sequence_breakers"
    check(name, value, isinstance(value, list | tuple) and len(value) <= MAX_BREAKERS, allowed)
    texts: list[str] = list(value)
    for text in texts:
        check(name, text, isinstance(text, str) and 0 < len(text) <= MAX_BREAKER, allowed)
    return texts


def _parse_token_ids(name: str, value: Any) -> list[int]:
    """Returns token ids as a list; accepts arrays."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    check(name, value, isinstance(ids, list | tuple), "a list of token ids")
    return [_parse_token_id(name, token) for token in ids]


def _parse_token_id(name: str, token: object) -> int:
    number = whole_number(token)
    if number is None or not 0 <= number <= INT32_MAX:
        raise InvalidRequest(
            f"{name}: got {shown(token)}, expected token ids (from 0 to {INT32_MAX})",
            param=name,
        )
    return number


def _parse_bias_token(key: object) -> int:
    """Returns the token id of a bias; JSON keys are strings."""
    try:
        number = int(key) if isinstance(key, str) else whole_number(key)
    except ValueError:
        number = None
    if number is None or not 0 <= number <= INT32_MAX:
        raise InvalidRequest(
            f"logit_bias: got the key {shown(key)}, expected token ids", param="logit_bias"
        )
    return number


def _parse_bias(key: object, value: object) -> float:
    number = to_float(value)
    check(
        "logit_bias",
        value,
        abs(number) <= MAX_BIAS,
        f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g} for token id {key}",
    )
    return number
