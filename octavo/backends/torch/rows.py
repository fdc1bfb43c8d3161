"""Which rows of a step belong to which request, and which keys they see: worked out on the host,
once a step and kind of mask.

Requests of one row each (decode) go together; those of more go one by one, between their first key
and their last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.backends.batch import StepBatch
from octavo.backends.kv import BLOCK_SIZE
from octavo.backends.torch.streams import on_device


@dataclass(frozen=True, slots=True)
class Span:
    """Rows start .. stop - 1 of the request `request`, which see keys from first_key to last_key -
    1.
    """

    request: int
    start: int
    stop: int
    first_key: int
    last_key: int

    @property
    def blocks(self) -> slice:
        """Of its block table."""
        return slice(self.first_key // BLOCK_SIZE, -(-self.last_key // BLOCK_SIZE))


@dataclass(frozen=True, slots=True)
class RequestRows:
    """`singles [n]`: requests that have one row, with these `rows [n]`; both None where they are
    all there is, in order.
    """

    spans: tuple[Span, ...]
    num_singles: int
    first_block: int = 0
    last_block: int = 0
    singles: Tensor | None = None
    rows: Tensor | None = None


def rows_of(
    batch: StepBatch, group: int, *, full: bool, window: int | None, device: torch.device
) -> RequestRows:
    starts = batch.query_starts
    context, positions = batch.context_lens[group], batch.positions[0]
    num_rows = np.diff(starts)
    singles = np.flatnonzero((num_rows == 1) & (context > 0))
    firsts = (
        positions[starts[:-1][singles]] + 1 - window
        if window is not None
        else np.zeros(len(singles), np.int32)
    )
    spans = [
        _span(batch, group, int(r), full=full, window=window)
        for r in np.flatnonzero((num_rows > 1) & (context > 0))
    ]
    first_block = max(0, int(firsts.min(initial=1 << 30))) // BLOCK_SIZE if len(singles) else 0
    last_block = -(-int(context[singles].max(initial=0)) // BLOCK_SIZE)
    if len(singles) == len(num_rows) == len(batch.token_ids):
        return RequestRows((), len(singles), first_block, last_block)
    at = on_device(np.stack([singles, starts[:-1][singles]]).astype(np.int64), device)
    return RequestRows(tuple(spans), len(singles), first_block, last_block, at[0], at[1])


def _span(batch: StepBatch, group: int, request: int, *, full: bool, window: int | None) -> Span:
    start, stop = int(batch.query_starts[request]), int(batch.query_starts[request + 1])
    context, first, last = (
        int(batch.context_lens[group, request]),
        0,
        int(batch.positions[0, stop - 1]) + 1,
    )
    if window is not None:
        first = max(0, int(batch.positions[0, start]) + 1 - window)
    return Span(request, start, stop, first, context if full else min(last, context))
