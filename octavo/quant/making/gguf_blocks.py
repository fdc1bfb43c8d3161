"""Rounds matrices to GGUF's block types: choice of type, grids that its scales can represent, and
block bytes.

Writes the layouts of `quant/gguf.py`. Rows that are not a multiple of 256 fall back as in
llama.cpp.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.quant.blocks import BlockLayout, Bytes, Numbers, Plane
from octavo.quant.gguf import BLOCK_TYPES, BlockType
from octavo.quant.making.grid import (
    Floats32,
    Grid,
    GridSpec,
    RoundedMatrix,
    fit_grid,
    inverse,
)
from octavo.quant.packed import Levels

BY_NAME = {kind.name: (number, kind) for number, kind in BLOCK_TYPES.items()}

WIDE = 256
"""Inputs per k-quant block."""
SIX_BITS_TOP = 63
SUPER_GROUP = 8
SIGNED_TOP = 127

TYPES: dict[tuple[int, bool], tuple[str, str]] = {
    (4, False): ("Q4_K", "Q4_1"),
    (4, True): ("Q4_0", "Q4_0"),
    (5, False): ("Q5_K", "Q5_1"),
    (5, True): ("Q5_0", "Q5_0"),
    (6, False): ("Q6_K", "Q8_0"),
    (6, True): ("Q6_K", "Q8_0"),
    (8, False): ("Q8_0", "Q8_0"),
    (8, True): ("Q8_0", "Q8_0"),
}
"""Types by (bits, symmetric): for rows that are a multiple of 256, and for multiples of 32."""


def type_for(num_inputs: int, bits: int, *, symmetric: bool) -> BlockType | None:
    """Returns the type for rows of `num_inputs` inputs; None if no block size fits."""
    wide, narrow = TYPES[bits, symmetric]
    kind = BY_NAME[wide if num_inputs % WIDE == 0 else narrow][1]
    return kind if num_inputs % kind.block_size == 0 else None


def fit_blocks(weight: Floats32, importance: Floats32 | None, kind: BlockType) -> Grid:
    """Returns the grid with the least squared error among those that a type's scales can
    represent.
    """
    layout = kind.layout
    assert layout is not None
    group = kind.block_size // layout.scales.per_block
    spec = GridSpec(layout.bits, group, "min" if layout.mins else "middle")
    grid = fit_grid(weight, importance, spec)
    if layout.super_scales is None:
        return grid
    steps = grid.scales.expand()
    if layout.mins is None:
        stored, supers = _two_levels(steps, kind, np.dtype(np.int8), SIGNED_TOP)
        return Grid(group, spec.top, Levels(stored, supers), zero_point=spec.middle)
    assert grid.mins is not None
    lows = grid.mins.expand()
    # A minimum above zero cannot be represented: the grid starts at zero and has the same end.
    ends = lows + steps * np.float32(spec.top)
    steps = np.where(lows > 0, ends / np.float32(spec.top), steps)
    small, supers = _two_levels(steps, kind, np.dtype(np.uint8), SIX_BITS_TOP)
    mins, super_mins = _two_levels(np.maximum(-lows, 0), kind, np.dtype(np.uint8), SIX_BITS_TOP)
    return Grid(group, spec.top, Levels(small, supers), mins=Levels(mins, -super_mins))


def _two_levels(
    numbers: Floats32, kind: BlockType, dtype: np.dtype, top: int
) -> tuple[NDArray, NDArray[np.float16]]:
    """Quantizes non-negative group values to small integers and one factor per block."""
    assert kind.layout is not None
    per_block = kind.layout.scales.per_block
    blocks = numbers.reshape(len(numbers), -1, per_block)
    supers = (blocks.max(axis=-1) / np.float32(top)).astype(np.float16)
    small = np.rint(blocks * inverse(supers.astype(np.float32))[..., None])
    return np.clip(small, 0, top).astype(dtype).reshape(numbers.shape), supers


def block_bytes(matrix: RoundedMatrix, kind: BlockType) -> Bytes:
    """Returns a rounded matrix's blocks, `[out, bytes per row]`."""
    layout, grid = kind.layout, matrix.grid
    assert layout is not None and matrix.permutation is None
    num_rows, num_inputs = matrix.codes.shape
    blocks = np.zeros((num_rows, num_inputs // kind.block_size, kind.block_bytes), np.uint8)
    codes = matrix.codes.reshape(num_rows, -1, kind.block_size)
    if layout.bits == 8:
        codes = codes - np.uint8(grid.zero_point)
    low = 0
    for plane in layout.planes:
        _write_plane(blocks, codes >> np.uint8(low), plane, kind.block_size)
        low += plane.bits
    _write_levels(blocks, layout, grid)
    return blocks.reshape(num_rows, -1)


def _write_plane(blocks: Bytes, codes: Bytes, plane: Plane, block_size: int) -> None:
    """Writes one bit plane of every code; the inverse of `blocks._joined`."""
    per_byte = 8 // plane.bits
    parts = (codes & np.uint8((1 << plane.bits) - 1)).reshape(
        *codes.shape[:-1], -1, per_byte, plane.run
    )
    shifts = np.arange(0, 8, plane.bits, dtype=np.uint8)[:, None]
    put = np.bitwise_or.reduce(parts << shifts, axis=-2)
    num_bytes = block_size * plane.bits // 8
    blocks[..., plane.start : plane.start + num_bytes] = put.reshape(*codes.shape[:-1], num_bytes)


def _write_levels(blocks: Bytes, layout: BlockLayout, grid: Grid) -> None:
    shape = blocks.shape[:2]
    if layout.scales.kind == "scales6":
        assert grid.mins is not None and grid.mins.super_scale is not None
        assert layout.super_mins is not None
        packed = _packed_six_bits(
            grid.scales.values.reshape(*shape, SUPER_GROUP),
            grid.mins.values.reshape(*shape, SUPER_GROUP),
        )
        blocks[..., layout.scales.start : layout.scales.start + packed.shape[-1]] = packed
        _write_numbers(blocks, layout.super_mins, -grid.mins.super_scale)
    else:
        _write_numbers(blocks, layout.scales, grid.scales.values)
        if layout.mins is not None and grid.mins is not None:
            _write_numbers(blocks, layout.mins, grid.mins.values)
    if layout.super_scales is not None and grid.scales.super_scale is not None:
        _write_numbers(blocks, layout.super_scales, grid.scales.super_scale)


def _write_numbers(blocks: Bytes, numbers: Numbers, values: NDArray) -> None:
    stored = np.ascontiguousarray(values.astype(numbers.kind)).view(np.uint8)
    stored = stored.reshape(*blocks.shape[:2], -1)
    blocks[..., numbers.start : numbers.start + stored.shape[-1]] = stored


def _packed_six_bits(scales: Bytes, mins: Bytes) -> Bytes:
    """Packs eight 6-bit scales and mins into 12 bytes, in the layout of ggml's get_scale_min_k4."""
    first = scales[..., :4] | (scales[..., 4:] >> 4) << 6
    second = mins[..., :4] | (mins[..., 4:] >> 4) << 6
    third = scales[..., 4:] & 0x0F | (mins[..., 4:] & 0x0F) << 4
    return np.concatenate([first, second, third], axis=-1).astype(np.uint8)
