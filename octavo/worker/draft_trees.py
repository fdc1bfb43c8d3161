"""Adds draft trees to a step: token ids, and separate blocks for all paths except the first."""

from __future__ import annotations

import numpy as np

from octavo.executor.batch import KvCopies
from octavo.executor.kv import BLOCK_SIZE
from octavo.worker.model_input import ModelInput
from octavo.worker.sampling.draft_layout import DraftLayout


def add_draft_trees(model_input: ModelInput, drafts: DraftLayout) -> None:
    """Sets the token ids of draft trees. Copies the K and V that paths share into the blocks of
    each further path.
    """
    size, scheduled = BLOCK_SIZE, model_input.scheduled
    copies: list[tuple[int, list[int]]] = []
    for index in drafts.trees:
        model_input.token_ids[drafts.get_token_rows(index)] = scheduled[index].draft_ids
    for row, leaf in enumerate(drafts.leaves, start=len(scheduled)):
        request = scheduled[leaf.index]
        blocks = request.leaf_blocks[leaf.path - 1]
        for group, index, block_id in blocks:
            model_input.block_tables[group, row, index] = block_id
        first, end = model_input.query_starts[row : row + 2]
        key_indices = model_input.key_indices[first:end]
        groups = {group for group, _, _ in blocks}
        for group in groups:
            table = model_input.block_tables[group, row]
            model_input.slots[group, first:end] = (
                table[key_indices // size] * size + key_indices % size
            )
        shared = drafts.get_shared_rows(leaf, request)
        for token, source in enumerate(shared, start=request.start):
            slots = [-1] * len(model_input.slots)
            for group in groups:
                block_id = model_input.block_tables[group, row, token // size]
                slots[group] = block_id * size + token % size
            copies.append((source, slots))
    copies.sort(key=lambda copy: copy[0])
    sources = np.array([source for source, _ in copies], np.int64)
    starts = np.searchsorted(sources, np.arange(len(model_input.token_ids) + 1))
    model_input.copies = KvCopies(
        starts.astype(np.int32),
        np.ascontiguousarray(np.array([slots for _, slots in copies], np.int32).T),
    )
