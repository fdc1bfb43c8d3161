"""Tiles of a plain or packed matrix times columns of rows, converted to floats: the inner loop of
packed and expert matmuls for which `scaled_sums.py` does not multiply codes.

Memory layout of a `DeviceWeight [.., out, in]`. A tile is BLOCK_N outputs by BLOCK_B neighbouring
bytes (elements, for plain floats):

    codes   [out, bytes of a row]   4 bits: a byte holds the inputs k and k + HALF, low nibble
                                    first, with k = byte // HALF * 2 HALF + byte % HALF: HALF is 1
                                    for "pairs", group / 2 for "halves"
    scales  [out, groups]           of UNIT neighbouring bytes each (0: one group, the row), times
                                    supers [out, supers] where scales have two levels
    mins    [out, groups]           likewise
    x       [rows, in]              read as [BLOCK_B, rows], so that the unpacked tile goes from
                                    registers into the product

value = (code - zero_point) * scale + min in fp32, rounded to x's dtype, as in
`DeviceWeight.floats`. If x has 16 bits, the sum is computed in a different order (`get_offset`),
with a deviation of up to 2^-17 scales. If a row has one scale and no min, codes are multiplied
directly and the sums are then multiplied by the scale. Sums are in fp32, from the first tile to the
last, and do not depend on other rows.

Tiles of 1 or 2 warps use matmul instructions with operands in registers, to which 4 neighbouring
code bytes of a thread are converted at a time. From 4 warps on, Triton uses Hopper's own matmul
instruction, which needs its operands in a different order than bytes are loaded in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.executor.torch.triton.codes import (
    NIBBLE_BASE,
    based_nibbles,
    bytes_in,
    bytes_in_fp32,
)
from octavo.executor.torch.triton.numbers import INTERPRETED, rounded
from octavo.executor.torch.weights.device_weight import DeviceLevels, DeviceWeight

CODE_BITS = (4, 5, 6, 8)
CODES = (torch.uint8, torch.int8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_reason(weight: DeviceWeight) -> str | None:
    """Returns the reason why kernels cannot read this weight; None if they can. Plain PyTorch reads
    every weight.
    """
    if weight.is_plain:
        return None if weight.codes.dtype in FLOATS else f"floats of {weight.codes.dtype}"
    if weight.bits not in CODE_BITS or weight.codes.dtype not in CODES:
        return f"codes of {weight.bits} bits in {weight.codes.dtype}"
    if weight.inverse_permutation is not None:
        return "permuted inputs"
    if weight.group < weight.width and weight.group & (weight.group - 1):
        return f"groups of {weight.group} inputs, no power of two"
    if not weight.codes.is_contiguous():
        return "codes that are not contiguous"
    return None


class MatrixBytes(NamedTuple):
    """A weight as kernels read it: arrays, sizes, and compile-time constants."""

    codes: Tensor
    lookup: Tensor | None
    scales: Tensor | None
    scale_supers: Tensor | None
    mins: Tensor | None
    min_supers: Tensor | None
    zeros: Tensor | None
    num_outputs: int
    row_bytes: int
    num_groups: int
    SCALE_SUPERS_OF: tl.constexpr
    """Scales per super-scale."""
    MIN_SUPERS_OF: tl.constexpr
    """Mins per super-scale."""
    IS_PLAIN: tl.constexpr
    NIBBLES: tl.constexpr
    HALF: tl.constexpr
    UNIT: tl.constexpr
    ZERO_POINT: tl.constexpr
    BY_ROW: tl.constexpr
    """Whether a row has a single scale and nothing else, so that sums can be scaled."""

    @staticmethod
    def of(weight: DeviceWeight) -> MatrixBytes:
        scales, scale_supers = _levels(weight.scales)
        mins, min_supers = _levels(weight.mins)
        num_groups = 1 if scales is None else scales.shape[-1]
        one_group = weight.is_plain or weight.group >= weight.width
        per_byte = 2 if weight.bits == 4 else 1
        return MatrixBytes(
            codes=weight.codes,
            lookup=weight.lookup,
            scales=scales,
            scale_supers=scale_supers,
            mins=mins,
            min_supers=min_supers,
            zeros=weight.zeros,
            num_outputs=weight.codes.shape[-2],
            row_bytes=weight.codes.shape[-1],
            num_groups=num_groups,
            SCALE_SUPERS_OF=tl.constexpr(_get_groups_per_super(scale_supers, num_groups)),
            MIN_SUPERS_OF=tl.constexpr(_get_groups_per_super(min_supers, num_groups)),
            IS_PLAIN=tl.constexpr(weight.is_plain),
            NIBBLES=tl.constexpr(weight.bits == 4 and not weight.is_plain),
            HALF=tl.constexpr(weight.group // 2 if weight.nibbles == "halves" else 1),
            UNIT=tl.constexpr(0 if one_group else weight.group // per_byte),
            ZERO_POINT=tl.constexpr(weight.zero_point),
            BY_ROW=tl.constexpr(
                not weight.is_plain
                and one_group
                and scale_supers is mins is weight.zeros is weight.lookup is None
            ),
        )


def _levels(levels: DeviceLevels | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if levels is None else (levels.values, levels.super_scale)


def _get_groups_per_super(supers: Tensor | None, num_groups: int) -> int:
    return 1 if supers is None else num_groups // supers.shape[-1]


@triton.jit
def tiles_of_floats_times_rows(
    x,
    x_offsets,
    x_mask,
    matrix,
    outputs,
    outputs_mask,
    first_tile,
    last_tile,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Multiplies tiles first_tile..last_tile-1 of `outputs [BLOCK_N] int64` (counted over all
    experts) with the rows of x at `x_offsets [BLOCK_M]`: `[BLOCK_N, BLOCK_M] fp32`.

    `matrix` is a `MatrixBytes`.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    for tile in range(first_tile, last_tile):
        at = tile * BLOCK_B + tl.arange(0, BLOCK_B)
        inside = at < matrix.row_bytes
        mask = outputs_mask[:, None] & inside[None, :]
        x_inside = inside[:, None] & x_mask[None, :]
        found = tl.load(
            matrix.codes + outputs[:, None] * matrix.row_bytes + at[None, :], mask=mask, other=0
        )
        if matrix.NIBBLES:
            low, high = unpack_nibble_tile(
                found, matrix, outputs, outputs_mask, tile, dtype, BLOCK_N, BLOCK_B
            )
            k = at // matrix.HALF * (2 * matrix.HALF) + at % matrix.HALF
            columns = tl.load(x + k[:, None] + x_offsets[None, :], mask=x_inside, other=0.0)
            acc = dot(low, columns, acc)
            k += matrix.HALF
            columns = tl.load(x + k[:, None] + x_offsets[None, :], mask=x_inside, other=0.0)
            acc = dot(high, columns, acc)
        else:
            values = found
            if not matrix.IS_PLAIN:
                values = unpack_byte_tile(
                    found, matrix, outputs, outputs_mask, tile, dtype, BLOCK_N, BLOCK_B
                )
            columns = tl.load(x + at[:, None] + x_offsets[None, :], mask=x_inside, other=0.0)
            acc = dot(values, columns, acc)
    if matrix.BY_ROW:
        acc *= tl.load(matrix.scales + outputs, mask=outputs_mask, other=0.0).to(tl.float32)[
            :, None
        ]
    return acc


@triton.jit
def unpack_nibble_tile(
    found,
    matrix,
    outputs,
    outputs_mask,
    tile,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Returns the values of the low and high nibbles of `found [BLOCK_N, BLOCK_B]` in `dtype`;
    codes minus the zero point if `BY_ROW`.
    """
    if matrix.BY_ROW:
        low, high = based_nibbles(found)
        low -= NIBBLE_BASE + matrix.ZERO_POINT
        high -= NIBBLE_BASE + matrix.ZERO_POINT
    else:
        scale, least = load_scales(matrix, outputs, outputs_mask, tile, BLOCK_N, BLOCK_B)
        if dtype == tl.float32 or matrix.lookup is not None:
            scale, least = spread(scale, BLOCK_N, BLOCK_B), spread(least, BLOCK_N, BLOCK_B)
            low = dequantize(found & 15, scale, least, matrix)
            high = dequantize(found >> 4, scale, least, matrix)
        else:
            offset = spread(get_offset(NIBBLE_BASE, scale, least, matrix), BLOCK_N, BLOCK_B)
            scale = spread(scale, BLOCK_N, BLOCK_B)
            low, high = based_nibbles(found)
            low = tl.fma(low, scale, offset)
            high = tl.fma(high, scale, offset)
    return rounded(low, dtype), rounded(high, dtype)


@triton.jit
def unpack_byte_tile(
    found,
    matrix,
    outputs,
    outputs_mask,
    tile,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Returns the values of `found [BLOCK_N, BLOCK_B]`, one code per byte, in `dtype`; codes minus
    the zero point if `BY_ROW`.
    """
    if matrix.BY_ROW:
        if matrix.ZERO_POINT == 0:
            values = bytes_in(found, dtype)
        else:
            values = rounded(bytes_in_fp32(found) - matrix.ZERO_POINT, dtype)
    else:
        scale, least = load_scales(matrix, outputs, outputs_mask, tile, BLOCK_N, BLOCK_B)
        if dtype == tl.float32 or matrix.lookup is not None:
            scale, least = spread(scale, BLOCK_N, BLOCK_B), spread(least, BLOCK_N, BLOCK_B)
            values = dequantize(found, scale, least, matrix)
        else:
            offset = spread(get_offset(0.0, scale, least, matrix), BLOCK_N, BLOCK_B)
            values = tl.fma(bytes_in_fp32(found), spread(scale, BLOCK_N, BLOCK_B), offset)
        values = rounded(values, dtype)
    return values


@triton.jit
def get_offset(base, scale, least, matrix):
    """Returns b such that (base + code) * scale + b is a code's value; `least` are mins or
    zeros.
    """
    offset = -(base + matrix.ZERO_POINT) * scale
    if matrix.zeros is not None:
        offset -= least * scale
    if matrix.mins is not None:
        offset += least
    return offset


@triton.jit
def dot(a, b, acc):
    """Returns a @ b, plus acc if it is not None, without intermediate rounding."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dequantize(codes, scale, least, matrix):
    """Dequantizes codes to fp32; `least` are mins or zeros."""
    if matrix.lookup is not None:
        values = tl.load(matrix.lookup + codes.to(tl.int32)) * scale
    elif matrix.zeros is not None:
        values = (codes.to(tl.float32) - matrix.ZERO_POINT - least) * scale
    else:
        values = (codes.to(tl.float32) - matrix.ZERO_POINT) * scale
    if matrix.mins is not None:
        values += least
    return values


@triton.jit
def load_scales(matrix, outputs, outputs_mask, tile, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """Returns the scales and the mins or zeros of a tile's groups; the scales twice if the weight
    has neither.
    """
    scale = load_group_levels(
        values=matrix.scales,
        supers=matrix.scale_supers,
        SUPERS_OF=matrix.SCALE_SUPERS_OF,
        matrix=matrix,
        outputs=outputs,
        outputs_mask=outputs_mask,
        tile=tile,
        BLOCK_N=BLOCK_N,
        BLOCK_B=BLOCK_B,
    )
    least = scale
    if matrix.mins is not None:
        least = load_group_levels(
            values=matrix.mins,
            supers=matrix.min_supers,
            SUPERS_OF=matrix.MIN_SUPERS_OF,
            matrix=matrix,
            outputs=outputs,
            outputs_mask=outputs_mask,
            tile=tile,
            BLOCK_N=BLOCK_N,
            BLOCK_B=BLOCK_B,
        )
    if matrix.zeros is not None:
        least = load_group_levels(
            values=matrix.zeros,
            supers=None,
            SUPERS_OF=1,
            matrix=matrix,
            outputs=outputs,
            outputs_mask=outputs_mask,
            tile=tile,
            BLOCK_N=BLOCK_N,
            BLOCK_B=BLOCK_B,
        )
    return scale, least


@triton.jit
def load_group_levels(
    values,
    supers,
    SUPERS_OF: tl.constexpr,
    matrix,
    outputs,
    outputs_mask,
    tile,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Returns the scale or min of each group of a tile, `[BLOCK_N, groups] fp32`."""
    UNIT: tl.constexpr = matrix.UNIT
    if UNIT == 0 or UNIT >= BLOCK_B:
        group = 0
        if UNIT > 0:
            # The tile behind the last one is loaded ahead, and not used.
            group = tl.minimum(tile * BLOCK_B // UNIT, matrix.num_groups - 1)
        found = tl.load(
            values + outputs * matrix.num_groups + group, mask=outputs_mask, other=0
        ).to(tl.float32)
        if supers is not None:
            at = outputs * (matrix.num_groups // SUPERS_OF) + group // SUPERS_OF
            found *= tl.load(supers + at, mask=outputs_mask, other=0.0).to(tl.float32)
        found = found[:, None]
    else:
        NUM: tl.constexpr = BLOCK_B // UNIT
        groups = tile * NUM + tl.arange(0, NUM)
        mask = outputs_mask[:, None] & (groups < matrix.num_groups)[None, :]
        found = tl.load(
            values + outputs[:, None] * matrix.num_groups + groups[None, :], mask=mask, other=0
        ).to(tl.float32)
        if supers is not None:
            at = (
                outputs[:, None] * (matrix.num_groups // SUPERS_OF) + (groups // SUPERS_OF)[None, :]
            )
            found *= tl.load(supers + at, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def spread(numbers, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """Repeats group values `[BLOCK_N, groups]` for each byte of a tile, `[BLOCK_N, BLOCK_B]`."""
    NUM: tl.constexpr = numbers.shape[1]
    return tl.reshape(
        tl.broadcast_to(numbers[:, :, None], (BLOCK_N, NUM, BLOCK_B // NUM)), (BLOCK_N, BLOCK_B)
    )
