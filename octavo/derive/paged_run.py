"""Runs a Program over one text on the reference backend, with paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.base import LoadWeight
from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.reference.backend import ReferenceBackend
from octavo.program.program import Program


def run_in_chunks(
    program: Program, load: LoadWeight, tokens: Sequence[int], chunk: int
) -> NDArray[Any]:
    """Returns the logits `[T, V]` of every token, computed `chunk` tokens at a time."""
    backend = ReferenceBackend()
    runnable = backend.prepare(program, load)
    count = -(-len(tokens) // BLOCK_SIZE)
    kv = backend.allocate(runnable.kv_layouts, [count] * len(program.groups))
    blocks = np.random.default_rng(0).permutation(count).astype(np.int32)
    return np.concatenate(
        [
            runnable.run(
                make_batch(program, tokens, start, min(start + chunk, len(tokens)), blocks), kv
            ).arrays["logits"]
            for start in range(0, len(tokens), chunk)
        ]
    )


def make_batch(
    program: Program, tokens: Sequence[int], start: int, stop: int, blocks: NDArray[np.int32]
) -> StepBatch:
    """Returns the batch of tokens start .. stop - 1 of one request, each of them sampled."""
    places = np.arange(start, stop, dtype=np.int32)
    groups = len(program.groups)
    slots = blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    return StepBatch(
        token_ids=np.asarray(tokens[start:stop], np.int32),
        places=places,
        positions=places[None],
        query_starts=np.array([0, stop - start], np.int32),
        context_lens=np.full((groups, 1), stop, np.int32),
        slots=np.broadcast_to(slots, (groups, len(places))).astype(np.int32),
        block_tables=np.broadcast_to(blocks, (groups, 1, len(blocks))).astype(np.int32),
        sample_rows=np.arange(stop - start, dtype=np.int32),
    )
