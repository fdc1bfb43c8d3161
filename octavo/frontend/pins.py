"""Pins prompt prefixes: the core computes a prefix, then keeps its blocks.

A pin has an expiry time of the wall clock, since it outlives engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from octavo.api.errors import InvalidRequest
from octavo.api.sampling_params import SamplingParams
from octavo.config.cache_options import CacheOptions
from octavo.engine.protocol.requests import Pin, PrefixRef
from octavo.frontend.input_processor import ParentRequest

FOR_GOOD_S = 100 * 365 * 86400.0
"""Time to live of a pin without expiry, in seconds."""

COMPUTE = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
"""Sampling params that make the core compute a prompt; the generated token is ignored."""


def make_prefix(request: ParentRequest, output_token_ids: Sequence[int] = ()) -> PrefixRef:
    """Returns the prefix that consists of a request's prompt and some of its output."""
    first = request.samples[0]
    return PrefixRef(
        [*first.prompt_token_ids, *output_token_ids],
        first.cache_salt,
        b"" if first.adapter is None else first.adapter.digest,
        first.media,
    )


def make_pin(prefix: PrefixRef, ttl_s: float | None) -> Pin:
    """Returns the pin of a computed prefix. `ttl_s` None: never expires; 0: unpins it."""
    now = time.time()
    return Pin(prefix, now + (FOR_GOOD_S if ttl_s is None else ttl_s), now)


def check_pin(ttl_s: float | None, cache: CacheOptions) -> None:
    """Raises InvalidRequest if the engine cannot pin; to be called before anything is computed."""
    if ttl_s is not None and not (0 <= ttl_s <= FOR_GOOD_S and math.isfinite(ttl_s)):
        raise InvalidRequest(
            f"ttl_s: got {ttl_s!r}, expected None (for good) or seconds from 0 to {FOR_GOOD_S:.0f}",
            param="ttl_s",
        )
    if cache.prefix_cache_dir is None:
        raise InvalidRequest(
            "pinning requires prefix_cache_dir",
            hint="start it with prefix_cache_dir",
        )
