"""Attention of requests of one row each, split over their contexts: the states of splits, which
`merge.py` makes results of.

    program (run, kv head and part of its query heads, z) takes the splits first + z, first + z + Z
    ... of its run, one by one

    lanes of a tile, 3 query heads a KV head, BLOCK_M = 16:
        a run of one row      h0 h1 h2  .  .  .  .  .  .  .  .  .  .  .  .  .
        a shared run          h0 h1 h2 h0 h1 h2 h0 h1 h2 h0 h1 h2 h0 h1 h2  .
                              \\ row 0 / \\ row 7 / \\ row 9 / ...

    states: m and l   [slots, H, splits, 2] fp32        slot: which of the step's rows of one-row
    requests
            acc       [slots, H, splits, v_width] fp32

A shared run's rows are of several requests whose block tables begin with the same splits
(`shared_prefix.py`): it reads those for all of them, and what each has beyond is read by its own
run. Contexts' lengths are read on the device, so a captured launch serves any.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.torch.triton.splits import SPLIT_KEYS, attend_split, load_query, visible


@triton.jit
def decode_kernel(
    states,
    accs,
    q,
    positions,
    context_lens,
    block_tables,
    row_of,
    request_of,
    own_splits,
    run_slots,
    run_splits,
    k,
    v,
    k_scales,
    v_scales,
    bias,
    scale,
    cap,
    first_slot,
    num_splits,
    table_width,
    q_row,
    q_head,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    PARTS: tl.constexpr,
    LANE_HEADS: tl.constexpr,
    RUN_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    FULL: tl.constexpr,
    DTYPE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_FIRST: tl.constexpr,
    K_REST: tl.constexpr,
    V_TILE: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_LIMIT: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`row_of`, `request_of [slots]` (None: a slot is its row and its request); `own_splits
    [slots]`: the first that a row's own run takes. `run_slots [runs, RUN_ROWS]` (-1: none),
    `run_splits [runs]`: the launch of shared runs; None: slot first_slot + run."""
    run = tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    lane = tl.arange(0, BLOCK_M)
    lane_row = lane // LANE_HEADS
    head = tl.program_id(1) % PARTS * LANE_HEADS + lane % LANE_HEADS
    if run_slots is not None:
        slot = tl.load(run_slots + run * RUN_ROWS + lane_row, mask=lane_row < RUN_ROWS, other=-1)
        leader = tl.maximum(tl.load(run_slots + run * RUN_ROWS), 0)
    else:
        slot = tl.where(lane_row == 0, first_slot + run, -1)
        leader = first_slot + run
    valid = (slot >= 0) & (head < SHARE)
    slot = tl.where(valid, slot, 0)
    head = tl.where(valid, kv_head * SHARE + head, 0)
    row, request, table = slot, slot, block_tables + leader.to(tl.int64) * table_width
    if row_of is not None:
        row = tl.load(row_of + slot)
        request = tl.load(request_of + slot)
        table = block_tables + tl.load(request_of + leader).to(tl.int64) * table_width
    position = tl.load(positions + row)
    low, high = visible(position, tl.load(context_lens + request), valid, WINDOW, FULL)
    first_key = tl.min(tl.where(valid, low, 1 << 30), axis=0)
    last_key = tl.max(high, axis=0)
    first_split = first_key // SPLIT_KEYS
    last_split = (last_key + SPLIT_KEYS - 1) // SPLIT_KEYS
    if run_splits is not None:
        first_split = 0
        last_split = tl.load(run_splits + run)
    elif own_splits is not None:
        first_split = tl.maximum(first_split, tl.load(own_splits + leader))
    q_first = load_query(q, row, head, valid, tl.arange(0, K_FIRST), q_row, q_head, K_WIDTH, DTYPE)
    q_rest = q_first
    if K_REST > 0:
        q_rest = load_query(
            q, row, head, valid, K_FIRST + tl.arange(0, K_REST), q_row, q_head, K_WIDTH, DTYPE
        )
    column = tl.arange(0, V_TILE)
    for split in range(first_split + tl.program_id(2), last_split, tl.num_programs(2)):
        begin = tl.maximum(first_key, split * SPLIT_KEYS)
        end = tl.minimum(last_key, (split + 1) * SPLIT_KEYS)
        m, l, acc = attend_split(
            q_first,
            q_rest,
            low,
            high,
            position,
            head,
            begin,
            end,
            table,
            kv_head,
            k,
            v,
            k_scales,
            v_scales,
            bias,
            scale,
            cap,
            KV_HEADS,
            K_STRIDE,
            V_STRIDE,
            K_WIDTH,
            V_WIDTH,
            K_FIRST,
            K_REST,
            V_TILE,
            BIAS,
            BIAS_LIMIT,
            CAPPED,
            PRECISION,
            BLOCK_M,
            BLOCK_N,
        )
        at = ((slot - first_slot).to(tl.int64) * HEADS + head) * num_splits + split
        tl.store(states + 2 * at, m, mask=valid)
        tl.store(states + 2 * at + 1, l, mask=valid)
        tl.store(
            accs + at[:, None] * V_WIDTH + column[None, :],
            acc,
            mask=valid[:, None] & (column < V_WIDTH)[None, :],
        )
