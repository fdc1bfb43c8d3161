"""Rotates queries and keys and stores keys and values in one launch, in place of two ropes and a
write.

    program (rows, y)    y < H:  q[t, y]      -> rotated -> q_out[t, y]
                         else:   k[t, y - H]  -> rotated -> K at slots[t]
                                 v[t, y - H]             -> V at slots[t]

    a head's columns     | start of them as they are | pairs that rotate | the rest as they are |

Rotated numbers are rounded to the step's dtype first, as the op by itself does, then to that of the
cache: the bytes are the same. int8 has one bf16 scale for each token and head, absmax / 127
(`kv_cache.as_int8`). Source: Su et al. 2021.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.rope_write import RopeWriteCall
from octavo.backends.torch.triton.numbers import TYPES, nearest_integer, rounded
from octavo.backends.torch.triton.tuning import tuned


@triton.jit
def largest(x):
    """Returns the largest |x| of each row, and whether all of its numbers are finite; `tl.max`
    alone ignores a NaN.
    """
    size = tl.abs(x)
    return tl.max(tl.where(size < float("inf"), size, 0.0), axis=1), tl.min(
        (size < float("inf")).to(tl.int32), axis=1
    )


@triton.jit
def scale_of(top, finite):
    """Returns the scale absmax / 127, rounded to bf16, in fp32; NaN where a row is not finite."""
    return rounded(
        tl.where(finite > 0, tl.div_rn(top, top * 0 + 127.0), float("nan")), tl.bfloat16
    ).to(tl.float32)


@triton.jit
def put(numbers, at, x, scale, inside):
    """Stores `x [ROWS, columns]` at addresses `at`: as it is, or as int8 codes with a `scale
    [ROWS]`.
    """
    if scale is None:
        tl.store(numbers + at, rounded(x, numbers.dtype.element_ty), mask=inside)
    else:
        wide = tl.broadcast_to(scale[:, None], x.shape)
        codes = tl.minimum(tl.maximum(nearest_integer(tl.div_rn(x, wide)), -127.0), 127.0)
        tl.store(numbers + at, tl.where(wide > 0, codes, 0.0).to(tl.int8), mask=inside)


@triton.jit
def rope_write_kernel(
    q_out,
    k_numbers,
    v_numbers,
    k_scales,
    v_scales,
    q,
    k,
    v,
    cos,
    sin,
    slots,
    num_rows,
    q_row,
    k_row,
    v_row,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    START: tl.constexpr,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
    APART: tl.constexpr,
    PAIR_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rotates and stores `ROWS` rows of one head. Pair i of a head is the column START + i * STEP
    and the one APART behind it; `REST_TILE` columns (0: none) hold those that do not turn.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_query = tl.program_id(1) < HEADS
    head = tl.where(is_query, tl.program_id(1), tl.program_id(1) - HEADS)
    source = k
    stride = k_row
    if is_query:
        source = q
        stride = q_row
    live = row < num_rows
    start = row.to(tl.int64)[:, None] * stride + head * K_WIDTH
    pair = tl.arange(0, PAIR_TILE)
    turns = live[:, None] & (pair < PAIRS)[None, :]
    one = START + pair * STEP
    a = tl.load(source + start + one[None, :], mask=turns, other=0.0).to(tl.float32)
    b = tl.load(source + start + one[None, :] + APART, mask=turns, other=0.0).to(tl.float32)
    angle = row.to(tl.int64)[:, None] * PAIRS + pair[None, :]
    c = tl.load(cos + angle, mask=turns, other=0.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    first = rounded(a * c - b * s, DTYPE)
    second = rounded(b * c + a * s, DTYPE)
    column = tl.arange(0, REST_TILE if REST_TILE > 0 else 1)
    column = tl.where(column < START, column, column + 2 * PAIRS)
    stays = live[:, None] & (column < K_WIDTH)[None, :]
    rest = tl.load(source + start + column[None, :], mask=stays, other=0.0)
    if is_query:
        to = (row.to(tl.int64) * HEADS + head)[:, None] * K_WIDTH
        tl.store(q_out + to + one[None, :], first, mask=turns)
        tl.store(q_out + to + one[None, :] + APART, second, mask=turns)
        if REST_TILE > 0:
            tl.store(q_out + to + column[None, :], rest, mask=stays)
    else:
        slot = tl.load(slots + row, mask=live, other=-1)
        place = tl.where(slot >= 0, slot, 0) * KV_HEADS + head
        written = (slot >= 0)[:, None]
        k_first = first.to(tl.float32)
        k_second = second.to(tl.float32)
        k_rest = rest.to(tl.float32)
        v_column = tl.arange(0, V_TILE)
        v_inside = written & (v_column < V_WIDTH)[None, :]
        v_at = row.to(tl.int64)[:, None] * v_row + head * V_WIDTH + v_column[None, :]
        values = tl.load(v + v_at, mask=live[:, None] & v_inside, other=0.0).to(tl.float32)
        k_scale = None
        v_scale = None
        if k_scales is not None:
            top, finite = largest(k_first)
            other_top, other_finite = largest(k_second)
            top = tl.maximum(top, other_top)
            finite = tl.minimum(finite, other_finite)
            if REST_TILE > 0:
                other_top, other_finite = largest(k_rest)
                top = tl.maximum(top, other_top)
                finite = tl.minimum(finite, other_finite)
            k_scale = scale_of(top, finite)
            top, finite = largest(values)
            v_scale = scale_of(top, finite)
            tl.store(k_scales + place, rounded(k_scale, tl.bfloat16), mask=slot >= 0)
            tl.store(v_scales + place, rounded(v_scale, tl.bfloat16), mask=slot >= 0)
        put(k_numbers, place[:, None] * K_WIDTH + one[None, :], k_first, k_scale, written & turns)
        put(
            k_numbers,
            place[:, None] * K_WIDTH + one[None, :] + APART,
            k_second,
            k_scale,
            written & turns,
        )
        if REST_TILE > 0:
            put(
                k_numbers,
                place[:, None] * K_WIDTH + column[None, :],
                k_rest,
                k_scale,
                written & stays,
            )
        put(v_numbers, place[:, None] * V_WIDTH + v_column[None, :], values, v_scale, v_inside)


def rope_write(call: RopeWriteCall, device: str) -> Tensor:
    """Writes keys and values, and returns the rotated queries `[T, H, Dk]`."""
    op, stored = call.op, call.k_stored
    out = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
    (num_rows, num_heads, k_width), (_, num_kv_heads, v_width) = call.q.shape, call.v.shape
    if not num_rows:
        return out
    pairs, rest = op.rotary_dim // 2, k_width - op.rotary_dim
    half = op.style == "half"
    tile = tuned("rope_write", device, width=k_width)
    rope_write_kernel[(-(-num_rows // tile["ROWS"]), num_heads + num_kv_heads)](
        q_out=out,
        k_numbers=stored.numbers,
        v_numbers=call.v_stored.numbers,
        k_scales=stored.scales,
        v_scales=call.v_stored.scales,
        q=call.q,
        k=call.k,
        v=call.v,
        cos=call.cos,
        sin=call.sin,
        slots=call.slots,
        num_rows=num_rows,
        q_row=call.q.stride(0),
        k_row=call.k.stride(0),
        v_row=call.v.stride(0),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        K_WIDTH=k_width,
        V_WIDTH=v_width,
        START=op.rotary_start,
        PAIRS=pairs,
        STEP=1 if half else 2,
        APART=pairs if half else 1,
        PAIR_TILE=triton.next_power_of_2(pairs),
        REST_TILE=triton.next_power_of_2(rest) if rest else 0,
        V_TILE=triton.next_power_of_2(v_width),
        DTYPE=TYPES[call.q.dtype],
        **tile,
    )
    return out
