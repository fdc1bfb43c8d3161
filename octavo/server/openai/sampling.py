"""Builds SamplingParams from a body.

Missing fields have the model's recommended value, or else the API's default.
"""

from __future__ import annotations

from typing import Any

from octavo.api.sampling_params import SamplingParams
from octavo.frontend.sampling_defaults import params_over
from octavo.server.openai.bodies import SAMPLING_FIELDS, SamplingBody
from octavo.server.openai.structured import parse_structured_outputs

UNLIMITED = -1
"""max_tokens without a limit, as in llama.cpp and LM Studio."""
SEARCH_FIELDS = ("beam_width", "length_penalty", "early_stopping")


def sampling_params(
    body: SamplingBody,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    **others: Any,
) -> SamplingParams:
    """Returns a body's SamplingParams; `others` override the body's fields.

    `max_tokens` None means the default, -1 no limit. A beam search ignores recommended values.
    """
    values = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if values.get("logit_bias") == {}:
        del values["logit_bias"]
    if max_tokens is not None:
        values["max_tokens"] = None if max_tokens == UNLIMITED else max_tokens
    search = _search(body)
    if search:
        defaults = SamplingParams(max_tokens=defaults.max_tokens)
    values |= {"logprobs": logprobs, "structured_outputs": parse_structured_outputs(body)}
    return params_over(defaults, {**values, **search, **others})


def _search(body: SamplingBody) -> dict[str, Any]:
    """Returns the fields of a beam search; {} for other requests."""
    if not body.use_beam_search:
        return {}
    values = {name: value for name in SEARCH_FIELDS if (value := getattr(body, name)) is not None}
    return {"beam_width": body.n or 1, **values}
