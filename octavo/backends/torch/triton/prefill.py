"""Attention of requests of several rows each, all in one launch: prompts, chunks at the end of
longer contexts, drafts to verify.

    rows of the step       | request 0 (9 rows)    | request 1 | request 2 (6 rows) | padding
    tiles of ROWS = 4      | 0 1 2 3|4 5 6 7|8 . . | (1 row)   | 0 1 2 3|4 5 . .

    program (tile, kv head and part of its query heads) walks over the keys that its rows see; with
    fixed tiles split by split, merging them left to right

A tile finds its request in `query_starts` by halving: request r's tiles begin at query_starts[r] //
ROWS + r, so that no list of them is made on the host. Tiles that no request fills end at once, and
requests of one row are `decode.py`'s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.torch.triton.numbers import rounded
from octavo.backends.torch.triton.splits import (
    SPLIT_KEYS,
    attend_keys,
    attend_split,
    finished,
    load_query,
    merged,
    visible,
)


@triton.jit
def request_of_tile(tile, query_starts, num_requests, ROWS: tl.constexpr):
    """The last request whose tiles begin at or before this one; -1 before the first."""
    known = 0
    beyond = num_requests
    while known < beyond:
        middle = (known + beyond) // 2
        if tl.load(query_starts + middle) // ROWS + middle <= tile:
            known = middle + 1
        else:
            beyond = middle
    return known - 1


@triton.jit
def prefill_kernel(
    out,
    q,
    query_starts,
    positions,
    context_lens,
    block_tables,
    k,
    v,
    k_scales,
    v_scales,
    bias,
    sinks,
    scale,
    cap,
    num_requests,
    table_width,
    q_row,
    q_head,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    PARTS: tl.constexpr,
    LANE_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
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
    BY_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`out [T, H, V_WIDTH]`, `q [T, H, K_WIDTH]`, `query_starts [R + 1]`. The last tiles, whose
    rows see most, come first.

    BY_SPLIT: each split has a state of its own, as a row's bits in any company want it; else one
    state goes through all keys, and those that every row of the tile sees are not compared with
    anything.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request = request_of_tile(tile, query_starts, num_requests, ROWS)
    if request < 0:
        return
    start = tl.load(query_starts + request)
    stop = tl.load(query_starts + request + 1)
    first_row = start + (tile - start // ROWS - request) * ROWS
    if (first_row >= stop) | (stop - start == 1):
        return
    kv_head = tl.program_id(1) // PARTS
    lane = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) % PARTS * LANE_HEADS + lane % LANE_HEADS
    row = first_row + lane // LANE_HEADS
    valid = (row < stop) & (head < SHARE) & (lane // LANE_HEADS < ROWS)
    row = tl.where(valid, row, start)
    head = tl.where(valid, kv_head * SHARE + head, 0)
    position = tl.load(positions + row)
    low, high = visible(position, tl.load(context_lens + request), valid, WINDOW, FULL)
    first_key = tl.min(tl.where(valid, low, 1 << 30), axis=0)
    last_key = tl.max(high, axis=0)
    table = block_tables + request.to(tl.int64) * table_width
    q_first = load_query(q, row, head, valid, tl.arange(0, K_FIRST), q_row, q_head, K_WIDTH, DTYPE)
    q_rest = q_first
    if K_REST > 0:
        q_rest = load_query(
            q, row, head, valid, K_FIRST + tl.arange(0, K_REST), q_row, q_head, K_WIDTH, DTYPE
        )
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_TILE], tl.float32)
    if BY_SPLIT:
        for split in range(first_key // SPLIT_KEYS, (last_key + SPLIT_KEYS - 1) // SPLIT_KEYS):
            begin = tl.maximum(first_key, split * SPLIT_KEYS)
            end = tl.minimum(last_key, (split + 1) * SPLIT_KEYS)
            m_next, l_next, acc_next = attend_split(
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
            m, l, acc = merged(m, l, acc, m_next, l_next, acc_next)
    else:
        all_from = (tl.max(tl.where(valid, low, 0), axis=0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        all_to = tl.maximum(
            all_from, tl.min(tl.where(valid, high, 1 << 30), axis=0) // BLOCK_N * BLOCK_N
        )
        for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
            begin = first_key if part == 0 else all_from if part == 1 else all_to
            end = tl.minimum(all_from, last_key) if part == 0 else all_to if part == 1 else last_key
            m, l, acc = attend_keys(
                m,
                l,
                acc,
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
                MASKED=part != 1,
            )
    acc = finished(m, l, acc, sinks, head, valid)
    column = tl.arange(0, V_TILE)
    to = (row.to(tl.int64) * HEADS + head)[:, None] * V_WIDTH + column[None, :]
    tl.store(
        out + to,
        rounded(acc, out.dtype.element_ty),
        mask=valid[:, None] & (column < V_WIDTH)[None, :],
    )
