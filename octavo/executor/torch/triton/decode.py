r"""Decode attention, split over contexts: writes split states, which `merge.py` combines into
results.

    program (run, kv head and part of its query heads, z) takes the splits first + z, first + z + Z
    ... of its run, one by one

    lanes of a tile, 3 query heads a KV head, BLOCK_M = 16:
        a run of one row      h0 h1 h2  .  .  .  .  .  .  .  .  .  .  .  .  .
        a shared run          h0 h1 h2 h0 h1 h2 h0 h1 h2 h0 h1 h2 h0 h1 h2  .
                              \ row 0 / \ row 7 / \ row 9 / ...

    slot: one of the step's requests of one row

The rows of a shared run belong to requests whose block tables begin with the same splits
(`shared_prefix.py`). The run reads these splits once for all rows; each request's own run reads its
remaining splits. Context lengths are read on the device, so that a captured launch works for any
lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.executor.torch.triton.splits import (
    SPLIT_KEYS,
    KeyRange,
    attend_keys,
    load_lanes,
    no_keys,
)


@triton.jit(do_not_specialize=["table_width", "first_slot", "num_splits"])
def decode_kernel(
    states,
    q,
    kv,
    scoring,
    mask,
    widths,
    heads,
    slots,
    runs,
    table_width,
    first_slot,
    num_splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes `states` (`SplitStates`). The arguments are bundles of `attention_arguments.py`:
    `SplitStates`, `Queries`, `PagedKv`, `Scoring`, `Mask`, `Widths`, `HeadTile`, `Slots`, `Runs`.

    table_width: blocks from one row of the block tables to the next. first_slot: first slot of the
    launch. num_splits: splits per head in `states`.
    """
    run = tl.program_id(0)
    shared_splits = 0
    if runs.splits is not None:
        shared_splits = tl.load(runs.splits + run)
        if shared_splits == 0:  # a captured step has runs for as many requests as may share
            return
    kv_head = tl.program_id(1) // heads.PARTS
    lane = tl.arange(0, BLOCK_M)
    lane_row = lane // heads.LANE_HEADS
    head = tl.program_id(1) % heads.PARTS * heads.LANE_HEADS + lane % heads.LANE_HEADS
    if runs.slots is not None:
        first = runs.slots + run * runs.ROWS
        slot = tl.load(first + lane_row, mask=lane_row < runs.ROWS, other=-1)
        leader = tl.maximum(tl.load(first), 0)
    else:
        slot = tl.where(lane_row == 0, first_slot + run, -1)
        leader = first_slot + run
    valid = (slot >= 0) & (head < heads.SHARE)
    slot = tl.where(valid, slot, 0)
    head = tl.where(valid, kv_head * heads.SHARE + head, 0)
    row = slot
    request = slot
    table = kv.block_tables + leader.to(tl.int64) * table_width
    if slots.row_of is not None:
        row = tl.load(slots.row_of + slot)
        request = tl.load(slots.request_of + slot)
        owner = tl.load(slots.request_of + leader).to(tl.int64)
        table = kv.block_tables + owner * table_width
    key_index = tl.load(slots.key_indices + row)
    context = tl.load(slots.context_lens + request)
    lanes = load_lanes(q, row, head, valid, key_index, context, mask, widths)
    first_key = tl.min(tl.where(valid, lanes.low, 1 << 30), axis=0)
    last_key = tl.max(lanes.high, axis=0)
    first_split = first_key // SPLIT_KEYS
    last_split = (last_key + SPLIT_KEYS - 1) // SPLIT_KEYS
    if runs.splits is not None:
        first_split = 0
        last_split = shared_splits
    elif runs.own_splits is not None:
        first_split = tl.maximum(first_split, tl.load(runs.own_splits + leader))
    column = tl.arange(0, widths.V_TILE)
    for split in range(first_split + tl.program_id(2), last_split, tl.num_programs(2)):
        begin = tl.maximum(first_key, split * SPLIT_KEYS)
        end = tl.minimum(last_key, (split + 1) * SPLIT_KEYS)
        state = no_keys(BLOCK_M, widths.V_TILE)
        keys = KeyRange(table, kv_head, begin, end)
        state = attend_keys(state, lanes, keys, kv, scoring, widths, BLOCK_N=BLOCK_N, MASKED=True)
        state_row = (slot - first_slot).to(tl.int64) * heads.HEADS + head
        at = state_row * num_splits + split
        tl.store(states.sums + 2 * at, state.m, mask=valid)
        tl.store(states.sums + 2 * at + 1, state.l, mask=valid)
        tl.store(
            states.accs + at[:, None] * widths.V + column[None, :],
            state.acc,
            mask=valid[:, None] & (column < widths.V)[None, :],
        )
