"""Attention of requests with several rows, all in one launch: prompts, chunks of longer contexts,
draft verification.

    rows of the step       | request 0 (9 rows)    | request 1 | request 2 (6 rows) | padding
    tiles of ROWS = 4      | 0 1 2 3|4 5 6 7|8 . . | (1 row)   | 0 1 2 3|4 5 . .

    program (tile, kv head and part of its query heads) processes the keys that its rows see; with
    fixed tiles split by split, merging them left to right

A tile finds its request in `query_starts` by bisection: request r's tiles begin at query_starts[r]
// ROWS + r, so the host need not compute a list. Programs of empty tiles exit at once; requests
with one row are computed by `decode.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.executor.torch.triton.numbers import rounded
from octavo.executor.torch.triton.splits import (
    SPLIT_KEYS,
    KeyRange,
    attend_keys,
    finished,
    load_lanes,
    merged,
    no_keys,
)


@triton.jit
def find_request(tile, requests, num_requests, ROWS: tl.constexpr):
    """Returns the last request whose tiles begin at or before this one; -1 before the first."""
    known = 0
    beyond = num_requests
    while known < beyond:
        middle = (known + beyond) // 2
        if tl.load(requests.query_starts + middle) // ROWS + middle <= tile:
            known = middle + 1
        else:
            beyond = middle
    return known - 1


@triton.jit(do_not_specialize=["table_width", "num_requests"])
def prefill_kernel(
    out,
    q,
    kv,
    scoring,
    mask,
    widths,
    heads,
    requests,
    sinks,
    table_width,
    num_requests,
    BY_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes `out [T, H, V]`. The arguments from `q` on are bundles of `attention_arguments.py`:
    `Queries`, `PagedKv`, `Scoring`, `Mask`, `Widths`, `HeadTile`, `Requests`.

    table_width: blocks from one row of the block tables to the next.

    BY_SPLIT: each split has a separate state, so that a row's bits are independent of other rows.
    Otherwise one state covers all keys, and keys visible to every row of the tile skip the mask.
    """
    # The last tiles see the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request = find_request(tile, requests, num_requests, heads.ROWS)
    if request < 0:
        return
    start = tl.load(requests.query_starts + request)
    stop = tl.load(requests.query_starts + request + 1)
    first_row = start + (tile - start // heads.ROWS - request) * heads.ROWS
    if (first_row >= stop) | (stop - start == 1):
        return
    kv_head = tl.program_id(1) // heads.PARTS
    lane = tl.arange(0, BLOCK_M)
    lane_row = lane // heads.LANE_HEADS
    head = tl.program_id(1) % heads.PARTS * heads.LANE_HEADS + lane % heads.LANE_HEADS
    row = first_row + lane_row
    valid = (row < stop) & (head < heads.SHARE) & (lane_row < heads.ROWS)
    row = tl.where(valid, row, start)
    head = tl.where(valid, kv_head * heads.SHARE + head, 0)
    key_index = tl.load(requests.key_indices + row)
    context = tl.load(requests.context_lens + request)
    lanes = load_lanes(q, row, head, valid, key_index, context, mask, widths)
    first_key = tl.min(tl.where(valid, lanes.low, 1 << 30), axis=0)
    last_key = tl.max(lanes.high, axis=0)
    table = kv.block_tables + request.to(tl.int64) * table_width
    state = no_keys(BLOCK_M, widths.V_TILE)
    if BY_SPLIT:
        for split in range(first_key // SPLIT_KEYS, (last_key + SPLIT_KEYS - 1) // SPLIT_KEYS):
            begin = tl.maximum(first_key, split * SPLIT_KEYS)
            end = tl.minimum(last_key, (split + 1) * SPLIT_KEYS)
            own = no_keys(BLOCK_M, widths.V_TILE)
            keys = KeyRange(table, kv_head, begin, end)
            own = attend_keys(own, lanes, keys, kv, scoring, widths, BLOCK_N=BLOCK_N, MASKED=True)
            state = merged(state, own)
    else:
        # Three parts: the keys that all rows see, the keys before them, and the keys after them.
        top_low = tl.max(tl.where(valid, lanes.low, 0), axis=0)
        all_from = (top_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        least_high = tl.min(tl.where(valid, lanes.high, 1 << 30), axis=0)
        all_to = tl.maximum(all_from, least_high // BLOCK_N * BLOCK_N)
        for part in tl.static_range(0 if mask.WINDOW + mask.CHUNK > 0 else 1, 3):
            begin = first_key if part == 0 else all_from if part == 1 else all_to
            end = tl.minimum(all_from, last_key) if part == 0 else all_to if part == 1 else last_key
            keys = KeyRange(table, kv_head, begin, end)
            state = attend_keys(
                state, lanes, keys, kv, scoring, widths, BLOCK_N=BLOCK_N, MASKED=part != 1
            )
    values = finished(state, sinks, head, valid)
    column = tl.arange(0, widths.V_TILE)
    to = (row.to(tl.int64) * heads.HEADS + head)[:, None] * widths.V + column[None, :]
    tl.store(
        out + to,
        rounded(values, out.dtype.element_ty),
        mask=valid[:, None] & (column < widths.V)[None, :],
    )
