"""Merges a row's split states from `decode.py` into the row's result.

program (slot, heads)   m, l [HEADS_A_TILE], acc [HEADS_A_TILE, v_width]
                        <-  SPLITS splits at once, from left to right

One split at once gives the bits of `splits.merged`, as batch invariance requires.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.executor.torch.triton.numbers import rounded
from octavo.executor.torch.triton.splits import (
    SPLIT_KEYS,
    State,
    finished,
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
    SPLITS: tl.constexpr,
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
    top, l, acc = no_keys(HEADS_A_TILE, widths.V_TILE)
    for first in tl.range(first_split, last_split, SPLITS, num_stages=STAGES):
        split = first + tl.arange(0, SPLITS)
        there = (split < last_split)[:, None] & valid[None, :]
        at = (tl.program_id(0).to(tl.int64) * HEADS + head)[None, :] * num_splits + split[:, None]
        tops = tl.load(states.sums + 2 * at, mask=there, other=float("-inf"))
        sums = tl.load(states.sums + 2 * at + 1, mask=there, other=0.0)
        accs = tl.load(
            states.accs + at[:, :, None] * widths.V + column[None, None, :],
            mask=there[:, :, None] & (column < widths.V)[None, None, :],
            other=0.0,
        )
        before = top
        top = tl.maximum(before, tl.max(tops, axis=0))
        base = tl.where(top == float("-inf"), 0.0, top)
        kept, added = tl.exp2(before - base), tl.exp2(tops - base[None, :])
        l = tl.fma(l, kept, tl.sum(sums * added, axis=0))
        kept_columns = tl.broadcast_to(kept[:, None], acc.shape)
        acc = tl.fma(acc, kept_columns, tl.sum(accs * added[:, :, None], axis=0))
    to = (row.to(tl.int64) * HEADS + head)[:, None] * widths.V + column[None, :]
    values = finished(State(top, l, acc), sinks, head, valid)
    tl.store(out + to, rounded(values, out.dtype.element_ty), mask=inside)
