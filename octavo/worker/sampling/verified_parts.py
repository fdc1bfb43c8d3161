"""Splits a step in which more samples are to be verified than the backend verifies at once. A row's
numbers depend on no other row, so any split gives the same results.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.protocol.step import ScheduledRequest
from octavo.worker.input_batch import InputBatch


def split_verified(
    scheduled: Sequence[ScheduledRequest], rows: InputBatch, max_verified: int
) -> list[Sequence[ScheduledRequest]]:
    """Returns the requests in parts: those to verify by themselves, of at most `max_verified`
    sampled rows each.
    """
    if sum(map(_get_max_samples, scheduled)) <= max_verified:
        return [scheduled]
    parts: list[list[ScheduledRequest]] = [[]]
    others = []
    num_samples = 0
    for request, row in zip(scheduled, rows.indices(scheduled).tolist(), strict=True):
        is_verified = request.wants == "draw" and rows.sampling.must_verify(
            row, has_drafts=bool(request.draft_ids), is_search=request.search_of != ""
        )
        if not is_verified:
            others.append(request)
            continue
        if num_samples + _get_max_samples(request) > max_verified:
            parts.append([])
            num_samples = 0
        parts[-1].append(request)
        num_samples += _get_max_samples(request)
    if len(others) == len(scheduled):
        return [scheduled]
    return [part for part in (others, *parts) if part]


def _get_max_samples(request: ScheduledRequest) -> int:
    """Returns the largest number of sampled rows of a request."""
    num_targets = 0 if request.num_prompt_logprobs is None else request.num_tokens
    return num_targets + (len(request.draft_ids) + 1 if request.wants == "draw" else 0)
