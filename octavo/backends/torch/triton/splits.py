"""Attention over one split of 256 keys, and how the states of splits become a result: what all
attention kernels are made of.

A tile has M lanes, each one query row of one head; all heads of a tile share a KV head, so that a
key is read once for all of them. Of a split a lane has m (the largest score, in base 2), l (the sum
of its weights) and acc (their sum of values), all fp32. States are merged left to right (`merged`),
so it is the same whether one program walks over all splits or many programs take one each. A lane's
numbers depend on its own row and on the shape of the tile, never on the other lanes: keys that it
does not see change no bit of it.

K and V lie as `kv_cache.KvTensor` has them: `[blocks, 16, heads, width]`, int8 codes with a bf16
scale for each token and head. Sources: Dao et al. 2022 (tiles), Milakov and Gimelshein 2018
(merging), Kwon et al. 2023 (paging).
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_SIZE = tl.constexpr(16)
SPLIT_KEYS = tl.constexpr(256)
LOG2E = tl.constexpr(1.4426950408889634)

NO_BIAS = tl.constexpr(0)
SLOPES = tl.constexpr(1)
BY_DISTANCE = tl.constexpr(2)


@triton.jit
def visible(position, context, valid, WINDOW: tl.constexpr, FULL: tl.constexpr):
    """Keys that lanes see, `[M] int32` each: from the first to before the last; none where the lane
    is not valid.
    """
    low = tl.zeros_like(position)
    high = tl.minimum(position + 1, context)
    if FULL:
        high = context
    if WINDOW > 0:
        low = tl.maximum(position + 1 - WINDOW, 0)
    return tl.where(valid, low, 0), tl.where(valid, high, 0)


@triton.jit
def load_query(
    q, row, head, valid, column, row_stride, head_stride, WIDTH: tl.constexpr, DTYPE: tl.constexpr
):
    """`[M, columns]` of queries `[T, H, WIDTH]`; zeros behind the width and in lanes that are not
    valid.
    """
    inside = valid[:, None] & (column < WIDTH)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + head[:, None] * head_stride + column[None, :]
    return tl.load(q + at, mask=inside, other=0.0).to(DTYPE)


@triton.jit
def biased(scores, at, position, head, bias, BIAS: tl.constexpr, LIMIT: tl.constexpr):
    """Scores in base 2 with ALiBi's slopes `bias [H]`, or a bias by distance, `bias [H, 2 * LIMIT +
    1]`, which is constant beyond.
    """
    distance = at[None, :] - position[:, None]
    if BIAS == SLOPES:
        scores += tl.load(bias + head)[:, None] * distance.to(tl.float32) * LOG2E
    if BIAS == BY_DISTANCE:
        near = tl.minimum(tl.maximum(distance, -LIMIT), LIMIT) + LIMIT
        scores += tl.load(bias + head[:, None] * (2 * LIMIT + 1) + near) * LOG2E
    return scores


@triton.jit
def capped(x):
    """tanh."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def attend_split(
    q_first,
    q_rest,
    low,
    high,
    position,
    head,
    first_key,
    last_key,
    table,
    kv_head,
    k,
    v,
    k_scales,
    v_scales,
    bias,
    scale,
    cap,
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
    """(m `[M]`, l `[M]`, acc `[M, V_TILE]`) of the keys first_key .. last_key - 1 of one split,
    BLOCK_N at a time.

    `q_first [M, K_FIRST]`, `q_rest [M, K_REST]`: the queries' columns, in two parts so that 192 or
    576 of them are not padded to the next power of two. `low`, `high [M]`: the keys that each lane
    sees. `table`: the request's blocks. `K_STRIDE`, `V_STRIDE`: numbers from one head to the next.
    No key outside first_key .. last_key - 1 is read, whatever it is.
    """
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_TILE], tl.float32)
    return attend_keys(
        m,
        l,
        acc,
        q_first,
        q_rest,
        low,
        high,
        position,
        head,
        first_key,
        last_key,
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
        MASKED=True,
    )


@triton.jit
def attend_keys(
    m,
    l,
    acc,
    q_first,
    q_rest,
    low,
    high,
    position,
    head,
    first_key,
    last_key,
    table,
    kv_head,
    k,
    v,
    k_scales,
    v_scales,
    bias,
    scale,
    cap,
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
    MASKED: tl.constexpr,
):
    """The state of a split, with the keys first_key .. last_key - 1 taken in; as `attend_split`
    says.

    Not MASKED: every lane sees them all, and they begin and end with a block of BLOCK_N, so that
    nothing is compared.
    """
    column = tl.arange(0, K_FIRST)
    v_column = tl.arange(0, V_TILE)
    for start in range(first_key // BLOCK_N * BLOCK_N, last_key, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = tl.full([BLOCK_N], 1, tl.int1)
        if MASKED:
            inside = (at >= first_key) & (at < last_key)
        block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0)
        slot = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE) * KV_HEADS + kv_head
        key = k + slot[None, :] * K_STRIDE
        keys = tl.load(
            key + column[:, None], mask=inside[None, :] & (column < K_WIDTH)[:, None], other=0.0
        )
        scores = tl.dot(q_first, keys.to(q_first.dtype), input_precision=PRECISION)
        if K_REST > 0:
            rest = K_FIRST + tl.arange(0, K_REST)
            keys = tl.load(
                key + rest[:, None], mask=inside[None, :] & (rest < K_WIDTH)[:, None], other=0.0
            )
            scores = tl.dot(q_rest, keys.to(q_first.dtype), acc=scores, input_precision=PRECISION)
        if k_scales is not None:
            scores *= tl.load(k_scales + slot, mask=inside, other=0.0).to(tl.float32)[None, :]
        scores *= scale
        if CAPPED:
            scores = cap * capped(scores)
        if BIAS != NO_BIAS:
            scores = biased(scores, at, position, head, bias, BIAS, BIAS_LIMIT)
        if MASKED:
            seen = (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, axis=1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(m - base)
        l = tl.fma(l, kept, tl.sum(weights, axis=1))
        m = top
        values = tl.load(
            v + slot[:, None] * V_STRIDE + v_column[None, :],
            mask=inside[:, None] & (v_column < V_WIDTH)[None, :],
            other=0.0,
        )
        if v_scales is not None:
            weights *= tl.load(v_scales + slot, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc = tl.dot(
            weights.to(q_first.dtype),
            values.to(q_first.dtype),
            acc=acc * kept[:, None],
            input_precision=PRECISION,
        )
    return m, l, acc


@triton.jit
def merged(m, l, acc, m_next, l_next, acc_next):
    """The state of what came before with that of the next split, `[M]`, `[M]`, `[M, V]`. A split
    without keys changes nothing.
    """
    top = tl.maximum(m, m_next)
    base = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp2(m - base)
    added = tl.exp2(m_next - base)
    l = tl.fma(l, kept, l_next * added)
    acc = tl.fma(acc, tl.broadcast_to(kept[:, None], acc.shape), acc_next * added[:, None])
    return top, l, acc


@triton.jit
def finished(m, l, acc, sinks, head, valid):
    """Values weighted, `[M, V] fp32`; zeros where no key is seen. `sinks [H]`: logits that join the
    sum of weights only.
    """
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        top = tl.maximum(m, sink)
        kept = tl.exp2(m - top)
        l = tl.fma(l, kept, tl.exp2(sink - top))
        acc = acc * kept[:, None]
    return acc / tl.where(l == 0, 1.0, l)[:, None]
