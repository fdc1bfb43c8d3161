"""A step's arrays of tokens, gathered from the permanent rows of its requests.

Knows rows and blocks; what is made of the tokens, a draw or a pooled row, is its callers' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import EncoderInput, ScheduledRequest
from octavo.executor.batch import KvCopies, StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.worker.input_batch import InputBatch
from octavo.worker.sampling.draft_acceptance import LeafSpan, StepRows


@dataclass(frozen=True, slots=True)
class Spans:
    """The tokens of a step's `R` requests, end to end."""

    rows: NDArray[np.intp]
    """Permanent row of each request, `[R]`."""
    ends: NDArray[np.int32]
    """Number of tokens of each request once this step's are computed, `[R]`."""
    query_starts: NDArray[np.int32]
    """First token of each request within the step, `[R+1]`."""

    @staticmethod
    def of(scheduled: Sequence[ScheduledRequest], rows: NDArray[np.intp]) -> Spans:
        """Returns the tokens of requests without draft trees, whose permanent rows are `rows`."""
        return Spans(
            rows,
            np.array([row.start + row.num_tokens for row in scheduled], np.int32),
            np.array([0, *accumulate(row.num_tokens for row in scheduled)], np.int32),
        )


def gather(rows: InputBatch, spans: Spans, num_steps: int = 1) -> StepBatch:
    """Returns the first of `num_steps` steps, without samples; its block tables reach to the
    last.
    """
    ends, query_starts = spans.ends, spans.query_starts
    counts = query_starts[1:] - query_starts[:-1]
    owners = spans.rows.repeat(counts)
    places = np.arange(query_starts[-1], dtype=np.int32)
    places += (ends - query_starts[1:]).repeat(counts)
    tables, adapters = rows.block_tables, rows.adapters[spans.rows]
    slots = tables[:, owners, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    num_blocks = -(-(int(ends.max()) + num_steps - 1) // BLOCK_SIZE)
    context_lens = ends[None].repeat(len(tables), axis=0)
    if len(rows.input_groups):
        input_lens = rows.input_lens[spans.rows]
        slots[rows.input_groups] = -1
        context_lens[rows.input_groups] = input_lens
        num_blocks = max(num_blocks, -(-int(input_lens.max()) // BLOCK_SIZE))
    batch = StepBatch(
        token_ids=rows.token_ids[owners, places],
        places=places,
        positions=(places + rows.first_positions[owners])[None],
        query_starts=query_starts,
        context_lens=context_lens,
        slots=np.ascontiguousarray(slots),
        block_tables=np.ascontiguousarray(tables[:, spans.rows, :num_blocks]),
        sample_rows=np.zeros(0, np.int32),
        sparse_from=rows.num_prompt_tokens[spans.rows],
        adapter_rows=adapters.repeat(counts) if adapters.max(initial=-1) >= 0 else None,
    )
    unread = rows.num_unread[spans.rows]
    if unread.any():
        _close_holes(batch, unread)
    return batch


def _close_holes(batch: StepBatch, unread: NDArray[np.int32]) -> None:
    """Lets the tables of requests that go without some blocks, `unread [R]`, have the others alone,
    side by side: keys carry their positions, so their places are only those among what is read.
    """
    counts = batch.query_starts[1:] - batch.query_starts[:-1]
    for index in np.flatnonzero(unread):
        table = batch.block_tables[:, index]
        read = table[:, table[0] != -1]
        table[:] = -1
        table[:, : read.shape[1]] = read
    num_tokens = unread * BLOCK_SIZE
    batch.places -= num_tokens.repeat(counts)
    batch.context_lens -= num_tokens
    if batch.sparse_from is not None:
        batch.sparse_from = batch.sparse_from - num_tokens


def add_leaves(batch: StepBatch, scheduled: Sequence[ScheduledRequest], rows: StepRows) -> None:
    """Gives a step's guesses that branch their tokens, and their further paths blocks of their own,
    to which the K and V of what they share with others are written too.
    """
    size, num_requests = BLOCK_SIZE, len(scheduled)
    copies: list[tuple[int, list[int]]] = []
    for index, row in enumerate(scheduled):
        if rows.trees[index] is not None:
            batch.token_ids[rows.places_of(index)] = row.draft_ids
    for at, leaf in enumerate(rows.leaves, start=num_requests):
        row, tree = scheduled[leaf.index], rows.trees[leaf.index]
        assert tree is not None, "a leaf is of a guess that branches"
        for group, index, block_id in row.leaf_blocks[leaf.path - 1]:
            batch.block_tables[group, at, index] = block_id
        first, end = batch.query_starts[at : at + 2]
        places = batch.places[first:end]
        own = {group for group, _, _ in row.leaf_blocks[leaf.path - 1]}
        for group in own:
            table = batch.block_tables[group, at]
            batch.slots[group, first:end] = table[places // size] * size + places % size
        shared = _shared_rows(rows, leaf, row)
        for place, source in enumerate(shared, start=row.start):
            slots = [-1] * len(batch.slots)
            for group in own:
                slots[group] = batch.block_tables[group, at, place // size] * size + place % size
            copies.append((source, slots))
    copies.sort(key=lambda copy: copy[0])
    sources = np.array([source for source, _ in copies], np.int64)
    starts = np.searchsorted(sources, np.arange(len(batch.token_ids) + 1))
    batch.copies = KvCopies(
        starts.astype(np.int32),
        np.ascontiguousarray(np.array([slots for _, slots in copies], np.int32).T),
    )


def _shared_rows(rows: StepRows, leaf: LeafSpan, row: ScheduledRequest) -> list[int]:
    """Returns the rows of the step that compute what a leaf's path shares with paths before it: the
    row's own tokens, then guesses.
    """
    tree = rows.trees[leaf.index]
    assert tree is not None, "a leaf is of a guess that branches"
    start = int(rows.query_starts[leaf.index])
    places = rows.places_of(leaf.index)
    num_shared = len(tree.paths[leaf.path]) - len(leaf.tokens)
    return [
        *range(start, start + row.num_tokens - len(row.draft_ids)),
        *(places[token] for token in tree.paths[leaf.path][:num_shared]),
    ]


def gather_inputs(rows: InputBatch, owners: NDArray[np.intp]) -> StepBatch:
    """Returns the step of an encoder over the whole inputs of the permanent rows `owners [R]`."""
    lens = rows.input_lens[owners]
    query_starts = np.zeros(len(owners) + 1, np.int32)
    np.cumsum(lens, out=query_starts[1:])
    places = np.arange(query_starts[-1], dtype=np.int32) - query_starts[:-1].repeat(lens)
    tables, groups = rows.block_tables, rows.input_groups
    at = tables[groups][:, owners.repeat(lens), places // BLOCK_SIZE]
    slots = np.full((len(tables), len(places)), -1, np.int32)
    slots[groups] = at * BLOCK_SIZE + places % BLOCK_SIZE
    context_lens = np.zeros((len(tables), len(owners)), np.int32)
    context_lens[groups] = lens
    num_blocks = -(-int(lens.max()) // BLOCK_SIZE)
    inputs = [rows.inputs[row] for row in owners.tolist()]
    given = _given_by(inputs)
    return StepBatch(
        token_ids=np.array([token for one in inputs for token in _ids_of(one)], np.int32),
        places=places,
        positions=places[None],
        query_starts=query_starts,
        context_lens=context_lens,
        slots=slots,
        block_tables=np.ascontiguousarray(tables[:, owners, :num_blocks]),
        sample_rows=np.zeros(0, np.int32),
        given=given,
        given_rows=None if given is None else np.arange(len(places), dtype=np.int32),
    )


def _ids_of(one: EncoderInput) -> Sequence[int]:
    """Returns the ids of an input's rows; zeros where it has none."""
    return one.token_ids or [0] * one.num_rows


def _given_by(inputs: Sequence[EncoderInput]) -> NDArray[np.float32] | None:
    """Returns the rows of inputs of numbers, end to end `[T, W]`; None where all are texts."""
    arrays = [
        np.frombuffer(one.rows, "<f4").reshape(one.num_rows, -1) for one in inputs if one.rows
    ]
    return np.concatenate(arrays).astype(np.float32) if arrays else None
