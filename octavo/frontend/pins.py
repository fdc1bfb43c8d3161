"""Pins prompt prefixes: the core computes a prefix, then keeps its blocks.

A pin has an expiry time of the wall clock, since it outlives engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from octavo.api.errors import InvalidRequest, WorkerFailed
from octavo.api.outputs import RequestOutput
from octavo.api.sampling_params import SamplingParams
from octavo.config.cache_options import CacheOptions
from octavo.engine.protocol.requests import Pin

FOR_GOOD_S = 100 * 365 * 86400.0
"""Time to live of a pin without expiry, in seconds."""

COMPUTE = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
"""Sampling params that make the core compute a prompt; the generated token is ignored."""


def make_pin(output: RequestOutput, prompt: Any, ttl_s: float | None) -> Pin:
    """Returns the pin of a computed prompt. `ttl_s` None: never expires; 0: unpins the prompt."""
    if output.error is not None:
        raise WorkerFailed(output.error)
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    now = time.time()
    return Pin(
        output.prompt_token_ids, salt or "", now + (FOR_GOOD_S if ttl_s is None else ttl_s), now
    )


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
