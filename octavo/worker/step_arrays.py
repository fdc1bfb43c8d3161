"""A step's arrays of tokens, gathered from the permanent rows of its requests.

Knows rows and blocks; what is made of the tokens, a draw or a pooled row, is its callers' business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.batch import StepBatch
from octavo.backends.kv import BLOCK_SIZE
from octavo.worker.request_rows import RequestRows


@dataclass(frozen=True, slots=True)
class Spans:
    """The tokens of a step's `R` requests, end to end."""

    rows: NDArray[np.intp]
    """Permanent row of each request, `[R]`."""
    ends: NDArray[np.int32]
    """Number of tokens of each request once this step's are computed, `[R]`."""
    query_starts: NDArray[np.int32]
    """First token of each request within the step, `[R+1]`."""


def gather(rows: RequestRows, spans: Spans, num_steps: int = 1) -> StepBatch:
    """Returns the first of `num_steps` steps, without samples; its block tables reach to the
    last.
    """
    ends, query_starts = spans.ends, spans.query_starts
    counts = query_starts[1:] - query_starts[:-1]
    owners = spans.rows.repeat(counts)
    places = np.arange(query_starts[-1], dtype=np.int32)
    places += (ends - query_starts[1:]).repeat(counts)
    tables = rows.block_tables
    slots = tables[:, owners, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    num_blocks = -(-(int(ends.max()) + num_steps - 1) // BLOCK_SIZE)
    return StepBatch(
        token_ids=rows.token_ids[owners, places],
        places=places,
        positions=places[None],
        query_starts=query_starts,
        context_lens=ends[None].repeat(len(tables), axis=0),
        slots=np.ascontiguousarray(slots),
        block_tables=np.ascontiguousarray(tables[:, spans.rows, :num_blocks]),
        sample_rows=np.zeros(0, np.int32),
    )
