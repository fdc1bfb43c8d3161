"""Attention over one split of 256 keys, and merging of split states: the building blocks of all
attention kernels.

A tile has M lanes, each one query row of one head; all heads of a tile share a KV head, so that a
key is read once for all of them. A lane's state of a split is m (the largest score, in base 2), l
(the sum of its weights) and acc (the weighted sum of values), all fp32. States are merged left to
right (`merged`), so that one program walking over all splits and many programs with one split each
give the same bits. A lane's numbers depend on its own row and the shape of the tile, never on other
lanes: keys that it does not see do not change its bits.

K and V have the layout of `kv_cache.KvTensor`: `[blocks, 16, heads, width]`, int8 codes or e4m3
codes (as uint8) with a bf16 scale for each token and head. Kernels get their arguments in the
bundles of `attention_arguments.py`. Sources: Dao et al. 2022 (tiles), Milakov and Gimelshein 2018
(merging), Kwon et al. 2023 (paging).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from octavo.executor.torch.triton.codes import bytes_in, e4m3_in, unpack_pairs

BLOCK_SIZE = tl.constexpr(16)
SPLIT_KEYS = tl.constexpr(256)
LOG2E = tl.constexpr(1.4426950408889634)

NO_BIAS = tl.constexpr(0)
SLOPES = tl.constexpr(1)
BY_DISTANCE = tl.constexpr(2)


class Lanes(NamedTuple):
    """Lanes of a tile: queries and visible keys."""

    q_first: Any
    """`[M, K_FIRST]`"""
    q_rest: Any
    """Remaining query columns, `[M, K_REST]`; `q_first` again without any. Two parts avoid padding
    192 or 576 columns to the next power of two."""
    low: Any
    """First visible key of each lane, `[M] int32`."""
    high: Any
    """End of each lane's visible keys, `[M] int32`."""
    key_index: Any
    """Key index of each lane's row, `[M] int32`."""
    head: Any
    """Query head of each lane, `[M] int32`."""


class State(NamedTuple):
    """Softmax state over some keys: m `[M]`, l `[M]` and acc `[M, V_TILE]`, fp32."""

    m: Any
    l: Any
    acc: Any


class KeyRange(NamedTuple):
    """A range of one request's keys for one KV head."""

    table: Any
    """Pointer to the request's block table."""
    head: Any
    first: Any
    end: Any
    """One past the last key."""


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, V_TILE: tl.constexpr):
    """Returns the state of no keys."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    return State(m, l, tl.zeros([BLOCK_M, V_TILE], tl.float32))


@triton.jit
def visible(key_index, context, valid, mask):
    """Returns each lane's first visible key and the end, `[M] int32`; invalid lanes see none."""
    low = tl.zeros_like(key_index)
    high = tl.minimum(key_index + 1, context)
    if mask.FULL:
        high = context
    if mask.WINDOW > 0:
        low = tl.maximum(key_index + 1 - mask.WINDOW, 0)
    if mask.CHUNK > 0:
        low = key_index - key_index % mask.CHUNK
    return tl.where(valid, low, 0), tl.where(valid, high, 0)


@triton.jit
def load_queries(q, row, head, valid, column, widths):
    """Loads queries `[M, columns]`, zero in invalid lanes and beyond the width."""
    inside = valid[:, None] & (column < widths.K)[None, :]
    at = row.to(tl.int64)[:, None] * q.row_stride + head[:, None] * q.head_stride + column[None, :]
    return tl.load(q.numbers + at, mask=inside, other=0.0).to(q.DTYPE)


@triton.jit
def load_lanes(q, row, head, valid, key_index, context, mask, widths):
    """Returns the `Lanes` of query rows `row` and heads `head`, `[M]` each."""
    low, high = visible(key_index, context, valid, mask)
    q_first = load_queries(q, row, head, valid, tl.arange(0, widths.K_FIRST), widths)
    q_rest = q_first
    if widths.K_REST > 0:
        column = widths.K_FIRST + tl.arange(0, widths.K_REST)
        q_rest = load_queries(q, row, head, valid, column, widths)
    return Lanes(q_first, q_rest, low, high, key_index, head)


@triton.jit
def biased(scores, at, lanes, scoring):
    """Adds the bias of key index `at [N]` to scores `[M, N]` in base 2."""
    distance = at[None, :] - lanes.key_index[:, None]
    if scoring.BIAS == SLOPES:
        scores += tl.load(scoring.bias + lanes.head)[:, None] * distance.to(tl.float32) * LOG2E
    if scoring.BIAS == BY_DISTANCE:
        LIMIT: tl.constexpr = scoring.BIAS_LIMIT
        near = tl.minimum(tl.maximum(distance, -LIMIT), LIMIT) + LIMIT
        scores += tl.load(scoring.bias + lanes.head[:, None] * (2 * LIMIT + 1) + near) * LOG2E
    return scores


@triton.jit
def capped(x):
    """Returns tanh(x)."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def attend_keys(
    state, lanes, some, kv, scoring, widths, BLOCK_N: tl.constexpr, MASKED: tl.constexpr
):
    """Adds the keys of `some` (`KeyRange`) to a state, BLOCK_N at a time.

    Without MASKED every lane must see all of these keys, and the range must be aligned to BLOCK_N.
    """
    m, l, acc = state
    column = tl.arange(0, widths.K_FIRST)
    v_column = tl.arange(0, widths.V_TILE)
    # A tile of few lanes reads values from shared memory transposed. Single bytes cannot be
    # transposed on the way, but pairs can: then even and odd columns are summed separately.
    IN_PAIRS: tl.constexpr = (
        kv.v.dtype.element_ty.primitive_bitwidth == 8
        and acc.shape[0] < 64
        and widths.V % 2 == 0
        and kv.V_STRIDE % 2 == 0
        and widths.V_TILE >= 32
    )
    if IN_PAIRS:
        acc, odd_acc = tl.split(tl.reshape(acc, (acc.shape[0], widths.V_TILE // 2, 2)))
        pair = tl.arange(0, widths.V_TILE // 2)
    for start in range(some.first // BLOCK_N * BLOCK_N, some.end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = tl.full([BLOCK_N], 1, tl.int1)
        if MASKED:
            inside = (at >= some.first) & (at < some.end)
        block = tl.load(some.table + at // BLOCK_SIZE, mask=inside, other=0)
        slot = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE) * kv.HEADS + some.head
        key = kv.k + slot[None, :] * kv.K_STRIDE
        keys = tl.load(
            key + column[:, None], mask=inside[None, :] & (column < widths.K)[:, None], other=0.0
        )
        dtype: tl.constexpr = lanes.q_first.dtype
        scores = tl.dot(lanes.q_first, operand(keys, dtype), input_precision=scoring.PRECISION)
        if widths.K_REST > 0:
            rest = widths.K_FIRST + tl.arange(0, widths.K_REST)
            keys = tl.load(
                key + rest[:, None], mask=inside[None, :] & (rest < widths.K)[:, None], other=0.0
            )
            scores = tl.dot(
                lanes.q_rest, operand(keys, dtype), acc=scores, input_precision=scoring.PRECISION
            )
        if kv.k_scales is not None:
            scores *= tl.load(kv.k_scales + slot, mask=inside, other=0.0).to(tl.float32)[None, :]
        scores *= scoring.scale
        if scoring.CAPPED:
            scores = scoring.cap * capped(scores)
        if scoring.BIAS != NO_BIAS:
            scores = biased(scores, at, lanes, scoring)
        if MASKED:
            seen = (at[None, :] >= lanes.low[:, None]) & (at[None, :] < lanes.high[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, axis=1))
        # A lane that has seen no key yet has top = -inf, and -inf - -inf would be NaN.
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(m - base)
        l = tl.fma(l, kept, tl.sum(weights, axis=1))
        m = top
        if kv.v_scales is not None:
            weights *= tl.load(kv.v_scales + slot, mask=inside, other=0.0).to(tl.float32)[None, :]
        weights = weights.to(dtype)
        if IN_PAIRS:
            pairs = (kv.v + slot[:, None] * kv.V_STRIDE).to(tl.pointer_type(tl.int16))
            words = tl.load(
                pairs + pair[None, :],
                mask=inside[:, None] & (pair < widths.V // 2)[None, :],
                other=0,
            )
            even, odd = unpack_pairs(words, kv.v.dtype.element_ty, dtype)
            acc = weighted(weights, even, acc, kept, scoring)
            odd_acc = weighted(weights, odd, odd_acc, kept, scoring)
        else:
            values = tl.load(
                kv.v + slot[:, None] * kv.V_STRIDE + v_column[None, :],
                mask=inside[:, None] & (v_column < widths.V)[None, :],
                other=0.0,
            )
            acc = weighted(weights, operand(values, dtype), acc, kept, scoring)
    if IN_PAIRS:
        acc = tl.interleave(acc, odd_acc)
    return State(m, l, acc)


@triton.jit
def operand(numbers, dtype: tl.constexpr):
    """Converts keys or values to the dtype of the other operand."""
    if numbers.dtype == tl.int8:
        numbers = bytes_in(numbers, dtype)
    elif numbers.dtype == tl.uint8:
        numbers = e4m3_in(numbers, dtype)
    else:
        numbers = numbers.to(dtype)
    return numbers


@triton.jit
def weighted(weights, values, acc, kept, scoring):
    """Returns acc times `kept [M]` plus the weighted sum of values."""
    return tl.dot(weights, values, acc=acc * kept[:, None], input_precision=scoring.PRECISION)


@triton.jit
def merged(before, after):
    """Merges the states of the previous keys and of the next split; an empty split changes
    nothing.
    """
    top = tl.maximum(before.m, after.m)
    base = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp2(before.m - base)
    added = tl.exp2(after.m - base)
    l = tl.fma(before.l, kept, after.l * added)
    kept_columns = tl.broadcast_to(kept[:, None], before.acc.shape)
    return State(top, l, tl.fma(before.acc, kept_columns, after.acc * added[:, None]))


@triton.jit
def finished(state, sinks, head, valid):
    """Returns the normalized values `[M, V] fp32`, zero if no key is visible. `sinks [H]` are
    logits that are only added to the sum of weights.
    """
    m, l, acc = state
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        top = tl.maximum(m, sink)
        kept = tl.exp2(m - top)
        l = tl.fma(l, kept, tl.exp2(sink - top))
        acc = acc * kept[:, None]
    return acc / tl.where(l == 0, 1.0, l)[:, None]
