"""Tiles of a matrix, plain or packed, times columns of rows: the loop that the products with packed
weights and with experts share.

A `DeviceWeight [.., out, in]` as its bytes lie. A tile is BLOCK_N outputs by BLOCK_B neighbouring
bytes (elements, of plain floats):

    codes  [out, bytes of a row]     4 bits: a byte holds the inputs k and k + HALF, low nibble
    first, with
                                     k = byte // HALF * 2 HALF + byte % HALF: HALF is 1 for "pairs",
                                     group / 2 for "halves"
    scales [out, groups]             of UNIT neighbouring bytes each (0: one group, the row), times
    supers [out, supers] of two levels mins   likewise x      [rows, in]                read as
    [BLOCK_B, rows], so that the unpacked tile goes from registers into the product

value = (code - zero_point) * scale + min in fp32, rounded to x's dtype, as `DeviceWeight.floats`
has it; sums in fp32, tile by tile from the first to the last: what one row gets does not depend on
the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.triton.numbers import INTERPRETED, rounded
from octavo.backends.torch.weights import DeviceLevels, DeviceWeight

CODE_BITS = (4, 5, 6, 8)
CODES = (torch.uint8, torch.int8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def refusal(weight: DeviceWeight) -> str | None:
    """Why kernels cannot read this weight, in words; None where they can. Everything else is for
    plain torch.
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


@dataclass(frozen=True, slots=True, eq=False)
class MatrixArguments:
    """What a kernel is told of a weight; `constants` choose the code that is compiled."""

    tensors: dict[str, Tensor | None]
    sizes: dict[str, int]
    constants: dict[str, Any]

    @staticmethod
    def of(weight: DeviceWeight) -> MatrixArguments:
        scales, scale_supers = _levels(weight.scales)
        mins, min_supers = _levels(weight.mins)
        tensors = {
            "codes": weight.codes,
            "lookup": weight.lookup,
            "scales": scales,
            "scale_supers": scale_supers,
        }
        per_byte = 2 if weight.bits == 4 else 1
        one_group = weight.is_plain or weight.group >= weight.width
        num_groups = 1 if scales is None else scales.shape[-1]
        sizes = {
            "num_outputs": weight.codes.shape[-2],
            "row_bytes": weight.codes.shape[-1],
            "num_groups": num_groups,
            "scale_supers_of": _groups_of_a_super(scale_supers, num_groups),
            "min_supers_of": _groups_of_a_super(min_supers, num_groups),
        }
        constants = {
            "IS_PLAIN": weight.is_plain,
            "NIBBLES": weight.bits == 4 and not weight.is_plain,
            "HALF": weight.group // 2 if weight.nibbles == "halves" else 1,
            "UNIT": 0 if one_group else weight.group // per_byte,
            "ZERO_POINT": weight.zero_point,
        }
        return MatrixArguments(tensors | {"mins": mins, "min_supers": min_supers}, sizes, constants)


def _levels(levels: DeviceLevels | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if levels is None else (levels.values, levels.super_scale)


def _groups_of_a_super(supers: Tensor | None, num_groups: int) -> int:
    return 1 if supers is None else num_groups // supers.shape[-1]


@triton.jit
def tiles_times_rows(
    x,
    x_offsets,
    x_mask,
    codes,
    lookup,
    scales,
    scale_supers,
    mins,
    min_supers,
    outputs,
    outputs_mask,
    first_tile,
    last_tile,
    row_bytes,
    num_groups,
    scale_supers_of,
    min_supers_of,
    IS_PLAIN: tl.constexpr,
    NIBBLES: tl.constexpr,
    HALF: tl.constexpr,
    UNIT: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """`[BLOCK_N, BLOCK_M] fp32`: tiles first .. last - 1 of `outputs [BLOCK_N] int64` (over all
    experts) times the rows of x that begin at `x_offsets [BLOCK_M]`."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for tile in range(first_tile, last_tile):
        at = tile * BLOCK_B + tl.arange(0, BLOCK_B)
        inside = at < row_bytes
        mask = outputs_mask[:, None] & inside[None, :]
        x_inside = inside[:, None] & x_mask[None, :]
        found = tl.load(codes + outputs[:, None] * row_bytes + at[None, :], mask=mask, other=0)
        if IS_PLAIN:
            acc = _dot(
                found, tl.load(x + at[:, None] + x_offsets[None, :], mask=x_inside, other=0.0), acc
            )
        else:
            scale = numbers_of_groups(
                scales,
                scale_supers,
                outputs,
                outputs_mask,
                tile,
                num_groups,
                scale_supers_of,
                UNIT,
                BLOCK_N,
                BLOCK_B,
            )
            least = scale
            if mins is not None:
                least = numbers_of_groups(
                    mins,
                    min_supers,
                    outputs,
                    outputs_mask,
                    tile,
                    num_groups,
                    min_supers_of,
                    UNIT,
                    BLOCK_N,
                    BLOCK_B,
                )
            dtype: tl.constexpr = x.dtype.element_ty
            if NIBBLES:
                k = at // HALF * (2 * HALF) + at % HALF
                low = rounded(
                    values_of(found & 15, lookup, scale, least, mins is not None, ZERO_POINT), dtype
                )
                acc = _dot(
                    low, tl.load(x + k[:, None] + x_offsets[None, :], mask=x_inside, other=0.0), acc
                )
                high = rounded(
                    values_of(found >> 4, lookup, scale, least, mins is not None, ZERO_POINT), dtype
                )
                acc = _dot(
                    high,
                    tl.load(x + (k + HALF)[:, None] + x_offsets[None, :], mask=x_inside, other=0.0),
                    acc,
                )
            else:
                values = rounded(
                    values_of(found, lookup, scale, least, mins is not None, ZERO_POINT), dtype
                )
                acc = _dot(
                    values,
                    tl.load(x + at[:, None] + x_offsets[None, :], mask=x_inside, other=0.0),
                    acc,
                )
    return acc


@triton.jit
def _dot(a, b, acc):
    """acc + a @ b with nothing rounded on the way."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def values_of(codes, lookup, scale, least, HAS_MINS: tl.constexpr, ZERO_POINT: tl.constexpr):
    """What codes stand for, in fp32."""
    if lookup is not None:
        values = tl.load(lookup + codes.to(tl.int32)) * scale
    else:
        values = (codes.to(tl.float32) - ZERO_POINT) * scale
    if HAS_MINS:
        values += least
    return values


@triton.jit
def numbers_of_groups(
    values,
    supers,
    outputs,
    outputs_mask,
    tile,
    num_groups,
    supers_of,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Scales or mins of a tile: a number beside each byte, `[BLOCK_N, BLOCK_B] fp32` (`[BLOCK_N,
    1]` where a tile lies in one group).
    """
    if UNIT == 0 or UNIT >= BLOCK_B:
        group = 0 if UNIT == 0 else tile * BLOCK_B // UNIT
        found = tl.load(values + outputs * num_groups + group, mask=outputs_mask, other=0).to(
            tl.float32
        )
        if supers is not None:
            num_supers = num_groups // supers_of
            found *= tl.load(
                supers + outputs * num_supers + group // supers_of, mask=outputs_mask, other=0.0
            ).to(tl.float32)
        spread = found[:, None]
    else:
        NUM: tl.constexpr = BLOCK_B // UNIT
        groups = tile * NUM + tl.arange(0, NUM)
        mask = outputs_mask[:, None] & (groups < num_groups)[None, :]
        found = tl.load(
            values + outputs[:, None] * num_groups + groups[None, :], mask=mask, other=0
        ).to(tl.float32)
        if supers is not None:
            at = outputs[:, None] * (num_groups // supers_of) + (groups // supers_of)[None, :]
            found *= tl.load(supers + at, mask=mask, other=0.0).to(tl.float32)
        spread = tl.reshape(
            tl.broadcast_to(found[:, :, None], (BLOCK_N, NUM, UNIT)), (BLOCK_N, BLOCK_B)
        )
    return spread
