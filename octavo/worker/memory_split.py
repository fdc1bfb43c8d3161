"""Finds the best split of memory between streamed weights and KV, for many concurrent requests.

Memory for KV is taken from pinned weights, which must then be read in each step. Decision 0032
explains why no alternative is tried first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.config.sizes import format_bytes
from octavo.worker.speed import Roofline

CLEARLY = 1.1
"""Speedup over the current split from which a split counts as better."""
AS_GOOD = 0.99
"""Fraction of the highest rate that counts as equally good."""


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Memory for weights and for KV, and the throughput of concurrent requests with it."""

    weights_bytes: int
    kv_bytes: int
    requests: int
    context: int
    """Number of tokens of each request."""
    streamed_bytes: int
    """Bytes that each step reads."""
    tokens_per_s: float
    """Upper bound on the total tokens per second of all requests."""

    def describe(self) -> str:
        return (
            f"and {format_bytes(self.kv_bytes)} for KV: {self.requests:,} requests of"
            f" {self.context:,} tokens, at most {self.tokens_per_s:.3g} tokens/s together"
        )


def better_split(roofline: Roofline, context: int) -> MemorySplit | None:
    """Returns the split of the roofline's memory with the highest throughput for requests of
    `context` tokens. Returns None if the current split is about as good, or no weights are streamed
    from a disk with a known rate.
    """
    footprint, capacity = roofline.footprint, roofline.capacity
    if not footprint.streamed_bytes or footprint.read_in_part or roofline.ceilings.disk is None:
        return None
    batch = min(capacity.max_requests(context), capacity.demand.max_num_seqs)
    rate = roofline.decode_tokens_per_s(batch, context) if batch else 0.0
    best = best_split(roofline, context)
    return best if best is not None and best.tokens_per_s > CLEARLY * rate else None


def best_split(roofline: Roofline, context: int) -> MemorySplit | None:
    """Returns the split with the fewest requests among the best ones. Returns None if not even one
    request fits.
    """
    max_requests = roofline.capacity.demand.max_num_seqs
    candidates = (_split(roofline, context, count) for count in range(1, max_requests + 1))
    splits = [split for split in candidates if split is not None]
    best = max((split.tokens_per_s for split in splits), default=0.0)
    return next((split for split in splits if split.tokens_per_s >= AS_GOOD * best), None)


def _split(roofline: Roofline, context: int, requests: int) -> MemorySplit | None:
    """Returns the split for a number of requests. Returns None if they, or one request of maximum
    context length, do not fit.
    """
    footprint, capacity = roofline.footprint, roofline.capacity
    longest_bytes = capacity.request_bytes(capacity.demand.max_model_len)
    kv_bytes = max(longest_bytes, requests * capacity.request_bytes(context))
    everything = footprint.resident_bytes + footprint.streamed_bytes
    weights_bytes = min(everything, footprint.resident_bytes + capacity.kv_bytes - kv_bytes)
    if weights_bytes < footprint.least_memory_bytes:
        return None
    streamed_bytes = everything - weights_bytes
    other = replace(roofline, footprint=replace(footprint, streamed_bytes=streamed_bytes))
    rate = other.decode_tokens_per_s(requests, context)
    return MemorySplit(weights_bytes, kv_bytes, requests, context, streamed_bytes, rate)
