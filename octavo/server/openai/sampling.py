"""From a request's fields to SamplingParams: what is given, else what the model's makers recommend, else the API's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.openai.protocol import SAMPLING_FIELDS, SamplingBody


def sampling_params(
    body: SamplingBody, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, **others: Any
) -> SamplingParams:
    """`others` are SamplingParams fields that the route sets itself, over the body's."""
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    recommended: Mapping[str, Any] = msgspec.structs.asdict(defaults)
    return SamplingParams(**{**recommended, **given, "max_tokens": max_tokens, "logprobs": logprobs, **others})


def check_stream_options(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: allowed only where stream is true", param="stream_options")
