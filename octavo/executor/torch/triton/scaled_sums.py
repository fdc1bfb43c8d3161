"""Tiles of a packed matrix times few rows: codes are multiplied as integers, and the sums of each
group are then multiplied by its scale.

    tile [BLOCK_N, BLOCK_B] of code bytes  ->  codes [groups, BLOCK_N, UNIT]
    x    [BLOCK_M, BLOCK_B]                ->  [groups, UNIT, BLOCK_M]

    sums    [groups, BLOCK_N, BLOCK_M] = codes @ x                  one matmul for each group
    acc    += sum over groups of scale * sums + min * (sum of x)

A 16-bit float represents a code exactly, so a weight needs no arithmetic of its own: with 8 rows,
scaling sums takes a quarter of the operations that scaling weights takes. A nibble is written into
the mantissa of a power of two (`codes.nibble_base`), and sums start at minus that power, plus the
zero point, times the sum of x. The sums of x are a matmul with a constant.

Triton gives each warp its own groups. Each warp has its own `acc`, and these are added at the end.
Scales of the next tile are loaded while a tile is multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.executor.torch.triton.codes import (
    negative_base,
    nibble_base,
    small_codes,
    spread_nibbles,
)
from octavo.executor.torch.triton.matrix_tile import (
    dot,
    load_scales,
    tiles_of_floats_times_rows,
)

MOST_ROWS = tl.constexpr(16)
"""Largest number of rows for which scaling sums takes less than scaling weights."""

FEWEST_CODES = tl.constexpr(16)
"""Smallest depth of a matmul instruction, in codes of a group with one nibble order."""

WARPS = tl.constexpr(2)
"""Warps of a launch, which have an accumulator each."""

ONE_TILE = tl.constexpr(16)
"""Outputs of a matmul instruction: the fewest for which a sum of x is computed."""


@triton.jit
def tiles_times_rows(
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

    `matrix` is a `MatrixBytes`. Plain, fp32 and looked-up weights, groups of fewer than
    FEWEST_CODES bytes and more than MOST_ROWS rows are multiplied as floats.
    """
    if (
        matrix.UNIT >= FEWEST_CODES
        and matrix.lookup is None
        and BLOCK_M <= MOST_ROWS
        and x.dtype.element_ty != tl.float32
    ):
        acc = scaled_sums(
            x=x,
            x_offsets=x_offsets,
            x_mask=x_mask,
            matrix=matrix,
            outputs=outputs,
            outputs_mask=outputs_mask,
            first_tile=first_tile,
            last_tile=last_tile,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_B=BLOCK_B,
        )
    else:
        acc = tiles_of_floats_times_rows(
            x=x,
            x_offsets=x_offsets,
            x_mask=x_mask,
            matrix=matrix,
            outputs=outputs,
            outputs_mask=outputs_mask,
            first_tile=first_tile,
            last_tile=last_tile,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_B=BLOCK_B,
        )
    return acc


@triton.jit
def scaled_sums(
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
    dtype: tl.constexpr = x.dtype.element_ty
    UNIT: tl.constexpr = matrix.UNIT if matrix.UNIT < BLOCK_B else BLOCK_B
    GROUPS: tl.constexpr = BLOCK_B // UNIT
    PARTS: tl.constexpr = GROUPS if GROUPS < WARPS else WARPS
    ZERO_POINT: tl.constexpr = matrix.ZERO_POINT if matrix.NIBBLES else 0
    BASE: tl.constexpr = nibble_base(dtype) + ZERO_POINT
    HAS_LEAST: tl.constexpr = matrix.mins is not None or matrix.zeros is not None
    acc = tl.zeros((PARTS, BLOCK_N, BLOCK_M), dtype=tl.float32)
    base = negative_base(matrix.codes, ZERO_POINT, dtype, GROUPS, ONE_TILE, UNIT)
    next_scale, next_least = load_scales(
        matrix, outputs, outputs_mask, first_tile, BLOCK_N, BLOCK_B
    )
    for tile in range(first_tile, last_tile):
        at = tile * BLOCK_B + tl.arange(0, BLOCK_B)
        inside = at < matrix.row_bytes
        mask = outputs_mask[:, None] & inside[None, :]
        x_inside = x_mask[:, None] & inside[None, :]
        scale, least = next_scale, next_least
        next_scale, next_least = load_scales(
            matrix, outputs, outputs_mask, tile + 1, BLOCK_N, BLOCK_B
        )
        found = tl.load(
            matrix.codes + outputs[:, None] * matrix.row_bytes + at[None, :], mask=mask, other=0
        )
        found = codes_by_group(found, BLOCK_N, GROUPS, UNIT)
        if matrix.NIBBLES:
            k = at // matrix.HALF * (2 * matrix.HALF) + at % matrix.HALF
            pointers = x + x_offsets[:, None] + k[None, :]
            first = rows_by_group(tl.load(pointers, x_inside, 0.0), BLOCK_M, GROUPS, UNIT)
            second = rows_by_group(
                tl.load(pointers + matrix.HALF, x_inside, 0.0), BLOCK_M, GROUPS, UNIT
            )
            low, high = spread_nibbles(found, dtype)
            x_sums = for_outputs(
                dot(base, second, dot(base, first, None)), GROUPS, BLOCK_N, BLOCK_M
            )
            sums = dot(high, second, dot(low, first, x_sums))
        else:
            pointers = x + x_offsets[:, None] + at[None, :]
            columns = rows_by_group(tl.load(pointers, x_inside, 0.0), BLOCK_M, GROUPS, UNIT)
            sums = dot(small_codes(found, matrix.ZERO_POINT, dtype), columns, None)
            if HAS_LEAST:
                x_sums = for_outputs(dot(base, columns, None), GROUPS, BLOCK_N, BLOCK_M)
        scale = scales_by_group(scale, GROUPS)
        if HAS_LEAST:
            least = scales_by_group(least, GROUPS) * (-1.0 / BASE)
        if matrix.zeros is not None:
            sums -= x_sums * least
        acc += added(sums * scale, GROUPS, PARTS, BLOCK_N, BLOCK_M)
        if matrix.mins is not None:
            acc += added(x_sums * least, GROUPS, PARTS, BLOCK_N, BLOCK_M)
    return tl.sum(acc, 0)


@triton.jit
def codes_by_group(codes, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr):
    """`[BLOCK_N, GROUPS * UNIT]` to `[GROUPS, BLOCK_N, UNIT]`, or one group as it is."""
    if GROUPS > 1:
        codes = tl.trans(tl.reshape(codes, (BLOCK_N, GROUPS, UNIT)), (1, 0, 2))
    return codes


@triton.jit
def rows_by_group(x, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, UNIT: tl.constexpr):
    """`[BLOCK_M, GROUPS * UNIT]` to `[GROUPS, UNIT, BLOCK_M]`, or one group transposed."""
    if GROUPS > 1:
        x = tl.trans(tl.reshape(x, (BLOCK_M, GROUPS, UNIT)), (1, 2, 0))
    else:
        x = tl.trans(x)
    return x


@triton.jit
def scales_by_group(scale, GROUPS: tl.constexpr):
    """`[BLOCK_N, GROUPS]` to `[GROUPS, BLOCK_N, 1]`, or one group as it is."""
    if GROUPS > 1:
        scale = tl.trans(scale)[:, :, None]
    return scale


@triton.jit
def for_outputs(x_sums, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Repeats sums of x, equal in all ONE_TILE rows, for BLOCK_N outputs."""
    REPEATS: tl.constexpr = BLOCK_N // ONE_TILE
    if GROUPS > 1:
        x_sums = tl.reshape(
            tl.broadcast_to(x_sums[:, None, :, :], (GROUPS, REPEATS, ONE_TILE, BLOCK_M)),
            (GROUPS, BLOCK_N, BLOCK_M),
        )
    else:
        x_sums = tl.reshape(
            tl.broadcast_to(x_sums[None, :, :], (REPEATS, ONE_TILE, BLOCK_M)), (BLOCK_N, BLOCK_M)
        )
    return x_sums


@triton.jit
def added(
    sums,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Adds the groups of each warp: `[PARTS, BLOCK_N, BLOCK_M]`."""
    return tl.sum(tl.reshape(sums, (GROUPS // PARTS, PARTS, BLOCK_N, BLOCK_M)), 0)
