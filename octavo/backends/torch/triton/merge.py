"""Merges the states that `decode.py` leaves of a row's splits, left to right, into the row's
result.

program (slot, heads): m, l [HEADS_A_TILE], acc [HEADS_A_TILE, v_width]  <-  split first, first + 1
... last
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.torch.triton.numbers import rounded
from octavo.backends.torch.triton.splits import SPLIT_KEYS, finished, merged, visible


@triton.jit
def merge_kernel(
    out,
    states,
    accs,
    positions,
    context_lens,
    row_of,
    request_of,
    sinks,
    first_slot,
    num_splits,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    FULL: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_TILE: tl.constexpr,
    HEADS_A_TILE: tl.constexpr,
):
    """`out [T, H, V_WIDTH]`; the rest as `decode_kernel` has it."""
    slot = first_slot + tl.program_id(0)
    head = tl.program_id(1) * HEADS_A_TILE + tl.arange(0, HEADS_A_TILE)
    valid = head < HEADS
    head = tl.where(valid, head, 0)
    row, request = slot, slot
    if row_of is not None:
        row = tl.load(row_of + slot)
        request = tl.load(request_of + slot)
    nowhere = tl.zeros([HEADS_A_TILE], tl.int32)
    low, high = visible(
        tl.load(positions + row + nowhere),
        tl.load(context_lens + request + nowhere),
        nowhere == 0,
        WINDOW,
        FULL,
    )
    first_split = tl.min(low, axis=0) // SPLIT_KEYS
    last_split = (tl.max(high, axis=0) + SPLIT_KEYS - 1) // SPLIT_KEYS
    column = tl.arange(0, V_TILE)
    inside = valid[:, None] & (column < V_WIDTH)[None, :]
    m = tl.full([HEADS_A_TILE], float("-inf"), tl.float32)
    l = tl.zeros([HEADS_A_TILE], tl.float32)
    acc = tl.zeros([HEADS_A_TILE, V_TILE], tl.float32)
    for split in range(first_split, last_split):
        at = (tl.program_id(0).to(tl.int64) * HEADS + head) * num_splits + split
        m_next = tl.load(states + 2 * at, mask=valid, other=float("-inf"))
        l_next = tl.load(states + 2 * at + 1, mask=valid, other=0.0)
        acc_next = tl.load(accs + at[:, None] * V_WIDTH + column[None, :], mask=inside, other=0.0)
        m, l, acc = merged(m, l, acc, m_next, l_next, acc_next)
    acc = finished(m, l, acc, sinks, head, valid)
    to = (row.to(tl.int64) * HEADS + head)[:, None] * V_WIDTH + column[None, :]
    tl.store(out + to, rounded(acc, out.dtype.element_ty), mask=inside)
