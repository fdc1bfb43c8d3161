"""Pinning the beginning of prompts: what the front asks of the core, first to compute it, then to
keep it.

A pin has a time to live, in the wall clock's seconds, since it outlives engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.config.engine_config import CacheOptions
from octavo.errors import InvalidRequest, WorkerFailed
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

FOR_GOOD_S = 100 * 365 * 86400.0

COMPUTE = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
"""One token, of which nobody reads anything, makes the core compute a prompt."""


class Pin(msgspec.Struct, tag=True):
    """What a prompt computed is kept until then, both times in seconds since 1970. One that ends
    now ends an earlier one.
    """

    token_ids: list[int]
    salt: str
    until: float
    now: float


def pin_of(output: RequestOutput, prompt: Any, ttl_s: float | None) -> Pin:
    """Of a prompt that was computed; `ttl_s` None is for good, 0 ends it."""
    if output.error is not None:
        raise WorkerFailed(output.error)
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    now = time.time()
    return Pin(
        output.prompt_token_ids, salt or "", now + (FOR_GOOD_S if ttl_s is None else ttl_s), now
    )


def check_pin(ttl_s: float | None, cache: CacheOptions) -> None:
    """Before anything is computed."""
    if ttl_s is not None and not (0 <= ttl_s <= FOR_GOOD_S and math.isfinite(ttl_s)):
        raise InvalidRequest(
            f"ttl_s: got {ttl_s!r}, allowed is None (for good) or seconds from 0 to"
            f" {FOR_GOOD_S:.0f}",
            param="ttl_s",
        )
    if cache.prefix_cache_dir is None:
        raise InvalidRequest(
            "nothing can be pinned: this engine keeps no blocks on disk",
            hint="start it with prefix_cache_dir",
        )
