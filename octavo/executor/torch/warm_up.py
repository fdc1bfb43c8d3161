"""Steps that compile every kernel which later steps launch, run before the first request.

Triton compiles a kernel for each combination of types, constants and absent arrays. Rows here write
no keys: their slots are in the spare block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from octavo.executor.base import BackendOptions
from octavo.executor.batch import SamplingBatch, StepBatch, sampling_records
from octavo.executor.kv import BLOCK_SIZE, SPLIT_KEYS

NUM_ROWS = (1, 9, 70)
"""Rows of steps for each way to multiply: a tile of 8 rows, tiles of 16, and more rows than tiles
take.
"""


def warm_up_steps(
    options: BackendOptions, num_groups: int, num_axes: int, vocab_size: int | None
) -> Iterator[StepBatch]:
    """Yields decode steps, steps of a prompt, and steps of both with and without a shared prefix.

    With a `vocab_size` a step is also sampled greedily, with and without cut-offs and filters.
    """
    shared = min(options.max_context, 2 * SPLIT_KEYS + 1)
    for most_rows in NUM_ROWS:
        num = max(1, min(most_rows, options.max_requests, options.max_tokens))
        for requests in (
            [(1, 1)] * num,
            [(1, shared)] * num,
            [(min(most_rows + 1, options.max_tokens, options.max_context),) * 2],
            [(1, 1), (2, 2)],
            [(1, shared), (1, shared), (2, 2)],
        ):
            rows = sum(count for count, _ in requests)
            if rows <= options.max_tokens and len(requests) <= options.max_requests:
                yield _step(requests, num_groups, num_axes)
    if vocab_size is not None:
        yield from _sampled(_step([(1, 1)], num_groups, num_axes), vocab_size)


def _step(requests: list[tuple[int, int]], num_groups: int, num_axes: int) -> StepBatch:
    """Returns a step of requests with these rows and contexts, all of block 0."""
    starts = np.cumsum([0, *(rows for rows, _ in requests)]).astype(np.int32)
    key_indices = np.concatenate([np.arange(end - rows, end) for rows, end in requests]).astype(
        np.int32
    )
    contexts = np.array([context for _, context in requests], np.int32)
    width = -(-int(contexts.max()) // BLOCK_SIZE)
    return StepBatch(
        token_ids=np.zeros(len(key_indices), np.int32),
        key_indices=key_indices,
        positions=np.broadcast_to(key_indices, (num_axes, len(key_indices))).copy(),
        query_starts=starts,
        context_lens=np.broadcast_to(contexts, (num_groups, len(contexts))).copy(),
        slots=np.full((num_groups, len(key_indices)), -1, np.int32),
        block_tables=np.zeros((num_groups, len(requests), width), np.int32),
        sample_rows=starts[1:] - 1,
    )


def _sampled(batch: StepBatch, vocab_size: int) -> Iterator[StepBatch]:
    plain, cut = {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5}
    # With a filter of the distribution, tokens are sampled from logits in fp64.
    in_fp64 = {"top_n_sigma": 5.0}
    for fields in ({}, plain, cut, plain | in_fp64, cut | in_fp64):
        records = sampling_records(len(batch.sample_rows), **fields)
        yield dataclasses.replace(batch, sampling=SamplingBatch.of(records, vocab_size))
