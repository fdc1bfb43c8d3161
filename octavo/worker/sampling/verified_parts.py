"""How a step's rows are shared out where more of them are sampled than a backend has checked at
once.

A row's numbers depend on no other row, so what is computed together is free to choose.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.protocol.step import ScheduledRequest
from octavo.worker.input_batch import InputBatch


def split_verified(
    scheduled: Sequence[ScheduledRequest], rows: InputBatch, most: int
) -> list[Sequence[ScheduledRequest]]:
    """Returns the rows in parts: those that have to be checked by themselves, of at most `most`
    sampled rows each.
    """
    if sum(map(_most_samples, scheduled)) <= most:
        return [scheduled]
    checked = [
        row.wants == "draw"
        and rows.sampling.must_verify(
            index, has_drafts=bool(row.draft_ids), is_search=row.search_of != ""
        )
        for row, index in zip(scheduled, rows.indices(scheduled).tolist(), strict=True)
    ]
    if not any(checked):
        return [scheduled]
    parts: list[list[ScheduledRequest]] = [[]]
    for row, is_checked in zip(scheduled, checked, strict=True):
        if is_checked:
            if sum(map(_most_samples, parts[-1])) + _most_samples(row) > most:
                parts.append([])
            parts[-1].append(row)
    others = [row for row, is_checked in zip(scheduled, checked, strict=True) if not is_checked]
    return [part for part in (others, *parts) if part]


def _most_samples(row: ScheduledRequest) -> int:
    """Returns the most sampled rows that a row of the plan comes to."""
    num_targets = 0 if row.num_prompt_logprobs is None else row.num_tokens
    return num_targets + (len(row.draft_ids) + 1 if row.wants == "draw" else 0)
