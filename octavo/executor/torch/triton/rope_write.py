"""Rotates queries and keys and stores keys and values in one launch, instead of two ropes and a KV
write.

    program (rows, y)    y < H:  q[t, y]      -> rotated -> q_out[t, y]
                         else:   k[t, y - H]  -> rotated -> K at slots[t]
                                 v[t, y - H]             -> V at slots[t]

    a head's columns     | start of them as they are | pairs that rotate | the rest as they are |

Rotated numbers are rounded to the step's dtype first, as the separate op does, and then to the
cache's dtype, so the bytes are identical. int8 and e4m3 have one bf16 scale for each token and
head, absmax / 127 or 448 (`kv_cache.as_int8`, `fp8.as_e4m3`). Source: Su et al. 2021.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.torch.rope_write import RopeWriteCall
from octavo.executor.torch.triton.codes import E4M3_LARGEST, e4m3_codes
from octavo.executor.torch.triton.numbers import TYPES, nearest_integer, rounded
from octavo.executor.torch.triton.tuning import tuned


class StridedRows(NamedTuple):
    """Contiguous heads with an arbitrary row stride."""

    numbers: Tensor
    row_stride: int

    @staticmethod
    def of(heads: Tensor) -> StridedRows:
        return StridedRows(heads, heads.stride(0))


class CacheSlots(NamedTuple):
    """Keys and values of one layer as in `KvTensor.raw`, and each row's slot, `[T]`."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None
    v_scales: Tensor | None
    slots: Tensor


class Angles(NamedTuple):
    """Cosines and sines of each row, `[T, PAIRS] fp32`."""

    cos: Tensor
    sin: Tensor


class HeadWidths(NamedTuple):
    """Numbers of heads and their widths."""

    HEADS: tl.constexpr
    KV_HEADS: tl.constexpr
    K: tl.constexpr
    V: tl.constexpr
    V_TILE: tl.constexpr

    @staticmethod
    def of(call: RopeWriteCall) -> HeadWidths:
        (_, num_heads, k_width), (_, num_kv_heads, v_width) = call.q.shape, call.v.shape
        sizes = (num_heads, num_kv_heads, k_width, v_width, triton.next_power_of_2(v_width))
        return HeadWidths(*map(tl.constexpr, sizes))


class TurnedPairs(NamedTuple):
    """Columns of a head that rotate in pairs, and the others."""

    START: tl.constexpr
    """First rotated column."""
    PAIRS: tl.constexpr
    STEP: tl.constexpr
    """Distance between pairs: pair i begins at column START + i * STEP."""
    APART: tl.constexpr
    """Distance between the two columns of a pair."""
    PAIR_TILE: tl.constexpr
    REST_TILE: tl.constexpr
    """Tile width of the columns that do not rotate; 0 if all do."""

    @staticmethod
    def of(call: RopeWriteCall) -> TurnedPairs:
        op = call.op
        pairs, rest = op.rotary_dim // 2, call.q.shape[-1] - op.rotary_dim
        step, apart = (1, pairs) if op.style == "half" else (2, 1)
        rest_tile = triton.next_power_of_2(rest) if rest else 0
        sizes = (op.rotary_start, pairs, step, apart, triton.next_power_of_2(pairs), rest_tile)
        return TurnedPairs(*map(tl.constexpr, sizes))


@triton.jit
def largest(x):
    """Returns the largest |x| of each row and whether all values are finite; `tl.max` alone ignores
    NaN.
    """
    size = tl.abs(x)
    return tl.max(tl.where(size < float("inf"), size, 0.0), axis=1), tl.min(
        (size < float("inf")).to(tl.int32), axis=1
    )


@triton.jit
def get_scale(top, finite, code_type: tl.constexpr):
    """Returns absmax / 127 (e4m3: 448) rounded to bf16, in fp32; NaN if a row is not finite."""
    LARGEST: tl.constexpr = E4M3_LARGEST if code_type == tl.uint8 else 127.0
    return rounded(
        tl.where(finite > 0, tl.div_rn(top, top * 0 + LARGEST), float("nan")), tl.bfloat16
    ).to(tl.float32)


@triton.jit
def store(numbers, at, x, scale, inside):
    """Stores `x [ROWS, columns]` at addresses `at`, as codes if there is a `scale [ROWS]`."""
    if scale is None:
        tl.store(numbers + at, rounded(x, numbers.dtype.element_ty), mask=inside)
    else:
        wide = tl.broadcast_to(scale[:, None], x.shape)
        scaled = tl.where(wide > 0, tl.div_rn(x, wide), 0.0)
        if numbers.dtype.element_ty == tl.uint8:
            codes = e4m3_codes(tl.minimum(tl.maximum(scaled, -E4M3_LARGEST), E4M3_LARGEST))
        else:
            codes = tl.minimum(tl.maximum(nearest_integer(scaled), -127.0), 127.0).to(tl.int8)
        tl.store(numbers + at, codes, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def rope_write_kernel(
    q_out,
    q,
    k,
    v,
    cache,
    angles,
    num_rows,
    heads,
    pairs,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotates and stores `ROWS` rows of one head. Argument bundles: `q`, `k` and `v` are
    `StridedRows`, then `CacheSlots`, `Angles`, `HeadWidths` and `TurnedPairs`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_query = tl.program_id(1) < heads.HEADS
    head = tl.where(is_query, tl.program_id(1), tl.program_id(1) - heads.HEADS)
    source = k.numbers
    stride = k.row_stride
    if is_query:
        source = q.numbers
        stride = q.row_stride
    live = row < num_rows
    start = row.to(tl.int64)[:, None] * stride + head * heads.K
    pair = tl.arange(0, pairs.PAIR_TILE)
    turns = live[:, None] & (pair < pairs.PAIRS)[None, :]
    one = pairs.START + pair * pairs.STEP
    a = tl.load(source + start + one[None, :], mask=turns, other=0.0).to(tl.float32)
    b = tl.load(source + start + one[None, :] + pairs.APART, mask=turns, other=0.0).to(tl.float32)
    angle = row.to(tl.int64)[:, None] * pairs.PAIRS + pair[None, :]
    c = tl.load(angles.cos + angle, mask=turns, other=0.0)
    s = tl.load(angles.sin + angle, mask=turns, other=0.0)
    first = rounded(a * c - b * s, DTYPE)
    second = rounded(b * c + a * s, DTYPE)
    column = tl.arange(0, pairs.REST_TILE if pairs.REST_TILE > 0 else 1)
    column = tl.where(column < pairs.START, column, column + 2 * pairs.PAIRS)
    stays = live[:, None] & (column < heads.K)[None, :]
    rest = tl.load(source + start + column[None, :], mask=stays, other=0.0)
    if is_query:
        to = (row.to(tl.int64) * heads.HEADS + head)[:, None] * heads.K
        tl.store(q_out + to + one[None, :], first, mask=turns)
        tl.store(q_out + to + one[None, :] + pairs.APART, second, mask=turns)
        if pairs.REST_TILE > 0:
            tl.store(q_out + to + column[None, :], rest, mask=stays)
    else:
        slot = tl.load(cache.slots + row, mask=live, other=-1)
        entry = tl.where(slot >= 0, slot, 0) * heads.KV_HEADS + head
        written = (slot >= 0)[:, None]
        k_first = first.to(tl.float32)
        k_second = second.to(tl.float32)
        k_rest = rest.to(tl.float32)
        v_column = tl.arange(0, heads.V_TILE)
        v_inside = written & (v_column < heads.V)[None, :]
        v_at = row.to(tl.int64)[:, None] * v.row_stride + head * heads.V + v_column[None, :]
        values = tl.load(v.numbers + v_at, mask=live[:, None] & v_inside, other=0.0).to(tl.float32)
        k_scale = None
        v_scale = None
        if cache.k_scales is not None:
            top, finite = largest(k_first)
            other_top, other_finite = largest(k_second)
            top = tl.maximum(top, other_top)
            finite = tl.minimum(finite, other_finite)
            if pairs.REST_TILE > 0:
                other_top, other_finite = largest(k_rest)
                top = tl.maximum(top, other_top)
                finite = tl.minimum(finite, other_finite)
            k_scale = get_scale(top, finite, cache.k.dtype.element_ty)
            top, finite = largest(values)
            v_scale = get_scale(top, finite, cache.v.dtype.element_ty)
            tl.store(cache.k_scales + entry, rounded(k_scale, tl.bfloat16), mask=slot >= 0)
            tl.store(cache.v_scales + entry, rounded(v_scale, tl.bfloat16), mask=slot >= 0)
        store(cache.k, entry[:, None] * heads.K + one[None, :], k_first, k_scale, written & turns)
        store(
            cache.k,
            entry[:, None] * heads.K + one[None, :] + pairs.APART,
            k_second,
            k_scale,
            written & turns,
        )
        if pairs.REST_TILE > 0:
            store(
                cache.k,
                entry[:, None] * heads.K + column[None, :],
                k_rest,
                k_scale,
                written & stays,
            )
        store(cache.v, entry[:, None] * heads.V + v_column[None, :], values, v_scale, v_inside)


def rope_write(call: RopeWriteCall, device: str) -> Tensor:
    """Writes keys and values; returns the rotated queries `[T, H, Dk]`."""
    k_stored, v_stored = call.k_stored, call.v_stored
    out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    (num_rows, num_heads, k_width), num_kv_heads = call.q.shape, call.v.shape[1]
    if not num_rows:
        return out
    tile = tuned("rope_write", device, width=k_width)
    rope_write_kernel[(-(-num_rows // tile["ROWS"]), num_heads + num_kv_heads)](
        q_out=out,
        q=StridedRows.of(call.q),
        k=StridedRows.of(call.k),
        v=StridedRows.of(call.v),
        cache=CacheSlots(k_stored.raw, v_stored.raw, k_stored.scales, v_stored.scales, call.slots),
        angles=Angles(call.cos, call.sin),
        num_rows=num_rows,
        heads=HeadWidths.of(call),
        pairs=TurnedPairs.of(call),
        DTYPE=TYPES[call.q.dtype],
        **tile,
    )
    return out
