"""Gathers a step's arrays from the permanent rows of its requests. Knows rows and blocks; what is
made of the tokens, a sample or a pooled row, is the callers' business.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import EncoderInput, ScheduledRequest
from octavo.executor.batch import KvCopies
from octavo.executor.kv import BLOCK_SIZE
from octavo.worker.input_batch import InputBatch
from octavo.worker.model_input import NO_ROWS, NO_SAMPLES, ModelInput
from octavo.worker.sampling.draft_layout import DraftLayout


def gather(
    rows: InputBatch,
    row_ids: NDArray[np.intp],
    ends: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    num_steps: int = 1,
) -> ModelInput:
    """Returns the first of `num_steps` steps, without samples; block tables reach to the last.

    Takes each request's permanent row `[R]`, its number of tokens at the end of the step `[R]`, and
    its first token within the step `[R+1]`.
    """
    counts = query_starts[1:] - query_starts[:-1]
    owners = row_ids.repeat(counts)
    places = np.arange(query_starts[-1], dtype=np.int32)
    places += (ends - query_starts[1:]).repeat(counts)
    tables, adapters = rows.block_tables, rows.adapters[row_ids]
    slots = tables[:, owners, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    num_blocks = -(-(int(ends.max()) + num_steps - 1) // BLOCK_SIZE)
    context_lens = ends[None].repeat(len(tables), axis=0)
    if len(rows.input_groups):
        # Cross-attention reads the encoder's input, whatever the decoder's length.
        input_lens = rows.input_lens[row_ids]
        slots[rows.input_groups] = -1
        context_lens[rows.input_groups] = input_lens
        num_blocks = max(num_blocks, -(-int(input_lens.max()) // BLOCK_SIZE))
    model_input = ModelInput(
        token_ids=rows.token_ids[owners, places],
        places=places,
        positions=(places + rows.first_positions[owners])[None],
        query_starts=query_starts,
        context_lens=context_lens,
        slots=np.ascontiguousarray(slots),
        block_tables=np.ascontiguousarray(tables[:, row_ids, :num_blocks]),
        sample_rows=NO_SAMPLES,
        sparse_from=rows.num_prompt_tokens[row_ids],
        adapter_rows=adapters.repeat(counts) if adapters.max(initial=-1) >= 0 else None,
        rows=row_ids,
        owner_rows=NO_ROWS,
        sample_ends=NO_SAMPLES,
    )
    unread = rows.num_unread[row_ids]
    if unread.any():
        _close_holes(model_input, unread)
    return model_input


def gather_scheduled(rows: InputBatch, scheduled: Sequence[ScheduledRequest]) -> ModelInput:
    """Returns a step of requests without draft tokens, without samples."""
    ends = np.array([row.start + row.num_tokens for row in scheduled], np.int32)
    starts = np.cumsum([0, *(row.num_tokens for row in scheduled)], dtype=np.int32)
    model_input = gather(rows, rows.indices(scheduled), ends, starts)
    model_input.scheduled = scheduled
    return model_input


def _close_holes(model_input: ModelInput, unread: NDArray[np.int32]) -> None:
    """Closes the holes of block tables that lack `unread [R]` blocks. Keys carry their positions,
    so the places of tokens only count the blocks that are read.
    """
    counts = model_input.query_starts[1:] - model_input.query_starts[:-1]
    for index in np.flatnonzero(unread):
        table = model_input.block_tables[:, index]
        read = table[:, table[0] != -1]
        table[:] = -1
        table[:, : read.shape[1]] = read
    num_tokens = unread * BLOCK_SIZE
    model_input.places -= num_tokens.repeat(counts)
    model_input.context_lens -= num_tokens
    if model_input.sparse_from is not None:
        model_input.sparse_from = model_input.sparse_from - num_tokens


def add_draft_trees(model_input: ModelInput, drafts: DraftLayout) -> None:
    """Sets the token ids of draft trees, and gives each further path its own blocks, to which the
    K and V that it shares with earlier paths are copied.
    """
    size, scheduled = BLOCK_SIZE, model_input.scheduled
    copies: list[tuple[int, list[int]]] = []
    for index in drafts.trees:
        model_input.token_ids[drafts.get_token_rows(index)] = scheduled[index].draft_ids
    for at, leaf in enumerate(drafts.leaves, start=len(scheduled)):
        request = scheduled[leaf.index]
        blocks = request.leaf_blocks[leaf.path - 1]
        for group, index, block_id in blocks:
            model_input.block_tables[group, at, index] = block_id
        first, end = model_input.query_starts[at : at + 2]
        places = model_input.places[first:end]
        own = {group for group, _, _ in blocks}
        for group in own:
            table = model_input.block_tables[group, at]
            model_input.slots[group, first:end] = table[places // size] * size + places % size
        shared = drafts.get_shared_rows(leaf, request)
        for place, source in enumerate(shared, start=request.start):
            slots = [-1] * len(model_input.slots)
            for group in own:
                block_id = model_input.block_tables[group, at, place // size]
                slots[group] = block_id * size + place % size
            copies.append((source, slots))
    copies.sort(key=lambda copy: copy[0])
    sources = np.array([source for source, _ in copies], np.int64)
    starts = np.searchsorted(sources, np.arange(len(model_input.token_ids) + 1))
    model_input.copies = KvCopies(
        starts.astype(np.int32),
        np.ascontiguousarray(np.array([slots for _, slots in copies], np.int32).T),
    )


def gather_inputs(rows: InputBatch, owners: NDArray[np.intp]) -> ModelInput:
    """Returns the step of an encoder over the whole inputs of the permanent rows `owners [R]`."""
    lens = rows.input_lens[owners]
    query_starts = np.zeros(len(owners) + 1, np.int32)
    np.cumsum(lens, out=query_starts[1:])
    places = np.arange(query_starts[-1], dtype=np.int32) - query_starts[:-1].repeat(lens)
    tables, groups = rows.block_tables, rows.input_groups
    block_ids = tables[groups][:, owners.repeat(lens), places // BLOCK_SIZE]
    slots = np.full((len(tables), len(places)), -1, np.int32)
    slots[groups] = block_ids * BLOCK_SIZE + places % BLOCK_SIZE
    context_lens = np.zeros((len(tables), len(owners)), np.int32)
    context_lens[groups] = lens
    num_blocks = -(-int(lens.max()) // BLOCK_SIZE)
    inputs = [rows.inputs[row] for row in owners.tolist()]
    # The row of numbers stands in for an id, which is 0 there.
    ids = [token_id for each in inputs for token_id in each.token_ids or [0] * each.num_rows]
    given = _join_rows(inputs)
    return ModelInput(
        token_ids=np.array(ids, np.int32),
        places=places,
        positions=places[None],
        query_starts=query_starts,
        context_lens=context_lens,
        slots=slots,
        block_tables=np.ascontiguousarray(tables[:, owners, :num_blocks]),
        sample_rows=NO_SAMPLES,
        given=given,
        given_rows=None if given is None else np.arange(len(places), dtype=np.int32),
        rows=owners,
    )


def _join_rows(inputs: Sequence[EncoderInput]) -> NDArray[np.float32] | None:
    """Returns the rows of inputs of numbers, end to end `[T, W]`; None if all are texts."""
    arrays = [
        np.frombuffer(each.rows, "<f4").reshape(each.num_rows, -1) for each in inputs if each.rows
    ]
    return np.concatenate(arrays).astype(np.float32) if arrays else None
