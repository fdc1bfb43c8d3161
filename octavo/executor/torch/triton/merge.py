"""Merges a row's split states from `decode.py`, left to right, into the row's result.

program (slot, heads)   m, l [HEADS_A_TILE], acc [HEADS_A_TILE, v_width]  <-  split first,
                        first + 1 ... last
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.executor.torch.triton.numbers import rounded
from octavo.executor.torch.triton.splits import (
    SPLIT_KEYS,
    State,
    finished,
    merged,
    no_keys,
    visible,
)


@triton.jit(do_not_specialize=["first_slot", "num_splits"])
def merge_kernel(
    out,
    states,
    slots,
    mask,
    widths,
    sinks,
    first_slot,
    num_splits,
    HEADS: tl.constexpr,
    HEADS_A_TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes `out [T, H, V]` from the `SplitStates` of the previous launch; `slots`, `mask`,
    `widths` and the numbers are those of that launch.
    """
    slot = first_slot + tl.program_id(0)
    head = tl.program_id(1) * HEADS_A_TILE + tl.arange(0, HEADS_A_TILE)
    valid = head < HEADS
    head = tl.where(valid, head, 0)
    row, request = slot, slot
    if slots.row_of is not None:
        row = tl.load(slots.row_of + slot)
        request = tl.load(slots.request_of + slot)
    # All heads of a row see the same keys: one lane would suffice, but `visible` takes a tile.
    zeros = tl.zeros([HEADS_A_TILE], tl.int32)
    key_index = tl.load(slots.key_indices + row + zeros)
    context = tl.load(slots.context_lens + request + zeros)
    low, high = visible(key_index, context, zeros == 0, mask)
    first_split = tl.min(low, axis=0) // SPLIT_KEYS
    last_split = (tl.max(high, axis=0) + SPLIT_KEYS - 1) // SPLIT_KEYS
    column = tl.arange(0, widths.V_TILE)
    inside = valid[:, None] & (column < widths.V)[None, :]
    state = no_keys(HEADS_A_TILE, widths.V_TILE)
    for split in tl.range(first_split, last_split, num_stages=STAGES):
        at = (tl.program_id(0).to(tl.int64) * HEADS + head) * num_splits + split
        m = tl.load(states.sums + 2 * at, mask=valid, other=float("-inf"))
        l = tl.load(states.sums + 2 * at + 1, mask=valid, other=0.0)
        acc = tl.load(
            states.accs + at[:, None] * widths.V + column[None, :], mask=inside, other=0.0
        )
        state = merged(state, State(m, l, acc))
    to = (row.to(tl.int64) * HEADS + head)[:, None] * widths.V + column[None, :]
    values = finished(state, sinks, head, valid)
    tl.store(out + to, rounded(values, out.dtype.element_ty), mask=inside)
