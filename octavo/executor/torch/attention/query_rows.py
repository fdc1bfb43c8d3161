"""Groups a step's rows by request and computes the keys they see: on the host, once per step and
mask.

Requests with one row (decode) are computed together, those with several (prefill, draft
verification) one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.streams import on_device


@dataclass(frozen=True, slots=True)
class Span:
    """Rows start..stop-1 of one request and their visible keys first_key..last_key-1."""

    request: int
    start: int
    stop: int
    first_key: int
    last_key: int

    @property
    def blocks(self) -> slice:
        """Block table entries that contain the visible keys."""
        return slice(self.first_key // BLOCK_SIZE, -(-self.last_key // BLOCK_SIZE))


@dataclass(frozen=True, slots=True)
class QueryRows:
    """A step's rows: requests with one row (`singles`) and with several (`spans`)."""

    spans: tuple[Span, ...]
    num_singles: int
    first_block: int = 0
    """First block table entry that any single row reads."""
    last_block: int = 0
    """End of the block table entries that single rows read."""
    singles: Tensor | None = None
    """Indices of the requests with one row, `[n] int64` on the device. None if every request of the
    step has one row.
    """
    rows: Tensor | None = None
    """Rows of `singles`, `[n] int64` on the device; None if `singles` is."""


def make_query_rows(
    batch: StepBatch,
    group: int,
    *,
    full: bool,
    window: int | None,
    chunks: bool = False,
    device: torch.device,
) -> QueryRows:
    starts = batch.query_starts
    context, key_indices = batch.context_lens[group], batch.key_indices
    num_rows = np.diff(starts)
    singles = np.flatnonzero((num_rows == 1) & (context > 0))
    firsts = first_keys(key_indices[starts[:-1][singles]], window, chunks=chunks)
    spans = [
        _span(batch, group, int(r), full=full, window=window, chunks=chunks)
        for r in np.flatnonzero((num_rows > 1) & (context > 0))
    ]
    first_block = max(0, int(firsts.min(initial=1 << 30))) // BLOCK_SIZE if len(singles) else 0
    last_block = -(-int(context[singles].max(initial=0)) // BLOCK_SIZE)
    if len(singles) == len(num_rows) == len(batch.token_ids):
        return QueryRows((), len(singles), first_block, last_block)
    if not len(singles):
        return QueryRows(tuple(spans), 0)
    # An even number of columns aligns both rows to 16 bytes: Triton compiles a kernel again for a
    # pointer that is not.
    arrays = np.zeros((2, len(singles) + len(singles) % 2), np.int64)
    arrays[:, : len(singles)] = singles, starts[:-1][singles]
    requests, rows = on_device(arrays, device)[:, : len(singles)]
    return QueryRows(tuple(spans), len(singles), first_block, last_block, requests, rows)


def first_keys(
    key_indices: NDArray[np.int32], window: int | None, *, chunks: bool
) -> NDArray[np.int32]:
    """Returns each row's first visible key; negative if all previous keys are visible."""
    if window is None:
        return np.zeros_like(key_indices)
    if chunks:
        return key_indices - key_indices % window
    firsts: NDArray[np.int32] = key_indices + 1 - window
    return firsts


def _span(
    batch: StepBatch, group: int, request: int, *, full: bool, window: int | None, chunks: bool
) -> Span:
    start, stop = int(batch.query_starts[request]), int(batch.query_starts[request + 1])
    context = int(batch.context_lens[group, request])
    last = int(batch.key_indices[stop - 1]) + 1
    if batch.limits is not None:
        last = int(batch.limits[start:stop].max())
    first = max(0, int(first_keys(batch.key_indices[start : start + 1], window, chunks=chunks)[0]))
    return Span(request, start, stop, first, context if full else min(last, context))
