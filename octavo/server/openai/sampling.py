"""SamplingParams from a request's fields.

A field that is not given has the model's recommended value, else the API's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.openai.protocol import SAMPLING_FIELDS, SamplingBody

SEARCH_FIELDS = ("beam_width", "length_penalty", "early_stopping")


def sampling_params(
    body: SamplingBody,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    **others: Any,
) -> SamplingParams:
    """Returns a body's SamplingParams; `others` are fields that the route sets over the body's."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    search = _search(body)
    recommended: Mapping[str, Any] = {} if search else msgspec.structs.asdict(defaults)
    return SamplingParams(
        **{
            **recommended,
            **given,
            **search,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            **others,
        }
    )


def _search(body: SamplingBody) -> dict[str, Any]:
    """Returns the fields of a beam search; {} where the request is none."""
    given = {name: value for name in SEARCH_FIELDS if (value := getattr(body, name)) is not None}
    if not body.use_beam_search:
        for name in given:
            raise InvalidRequest(f"{name}: allowed only where use_beam_search is true", param=name)
        return {}
    if body.stream:
        message = (
            "stream: got true with use_beam_search, allowed is false: a beam search knows its"
            " answer at the end"
        )
        raise InvalidRequest(message, param="stream")
    return {"beam_width": body.n or 1, **given}


def check_stream_options(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "stream_options: allowed only where stream is true", param="stream_options"
        )
