"""Quantized matrices in file layout: rows of blocks that interleave codes, scales and mins.

Describes and unpacks blocks; `quant/gguf.py` lists the formats. A backend may read blocks directly
(csrc/plan/packing.h does) or unpack them with `packed()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.quant.packed import Levels, PackedWeight

Bytes = NDArray[np.uint8]

NumberKind = Literal["float16", "int8", "scales6", "mins6", "scales4", "mins4", "signed6"]
NUMBER_BYTES: dict[NumberKind, int] = {
    "float16": 2,
    "int8": 1,
    "scales6": 12,
    "mins6": 12,
    "scales4": 16,
    "mins4": 16,
    "signed6": 12,
}
NUM_SHARED: dict[NumberKind, int] = {
    "scales6": 8,
    "mins6": 8,
    "scales4": 16,
    "mins4": 16,
    "signed6": 16,
}
"""Number of values in the bytes of each packed kind."""


@dataclass(frozen=True, slots=True)
class Plane:
    """A bit plane of a block's codes; planes are ordered from low to high bits.

    `run` bytes from `start` hold run * 8 / bits neighbouring inputs: input i is in byte i % run, in
    `bits` bits starting at bit i // run * bits. The next run follows.
    """

    start: int
    bits: int
    run: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """Scales or mins of each block: `count` values from byte `start`.

    "scales6" and "mins6" are the eight 6-bit scales and mins that Q4_K and Q5_K store in 12 bytes,
    "scales4" and "mins4" the sixteen 4-bit ones that Q2_K stores in 16; mins are stored without
    their minus sign. "signed6" are the sixteen 6-bit scales of Q3_K, stored in 12 bytes with an
    offset of 32.
    """

    start: int
    kind: NumberKind = "float16"
    count: int = 1

    def view(self, blocks: Bytes) -> NDArray:
        """Returns the values `[..., blocks, count]`; packed kinds are returned as raw bytes."""
        part = blocks[..., self.start : self.start + self.count * NUMBER_BYTES[self.kind]]
        return part if self.kind in NUM_SHARED else part.view(self.kind)

    @property
    def per_block(self) -> int:
        return NUM_SHARED.get(self.kind, self.count)

    def unpack(self, blocks: Bytes) -> NDArray:
        """Returns unpacked values as a copy `[..., blocks * count]`; packed mins are unsigned."""
        values = self.view(blocks)
        if self.kind in ("scales6", "mins6"):
            values = _six_bits(values, is_min=self.kind == "mins6")
        elif self.kind == "signed6":
            values = _signed_six_bits(values)
        elif self.kind in NUM_SHARED:
            values = values >> 4 if self.kind == "mins4" else values & 0x0F
        return np.ascontiguousarray(values).reshape(*blocks.shape[:-2], -1)


def _six_bits(packed: Bytes, *, is_min: bool) -> Bytes:
    """Unpacks six-bit numbers, `[..., 12]` to `[..., 8]`. Source: ggml's get_scale_min_k4.

    Scales and mins 0-3 are the low six bits of bytes 0-3 and 4-7; those of 4-7 take their low
    nibbles from bytes 8-11 (scale low, min high) and their top two bits from the top of bytes 0-3
    and 4-7.
    """
    first, third = packed[..., 4 * is_min : 4 * is_min + 4], packed[..., 8:]
    return np.concatenate(
        [first & 0x3F, (third >> 4 if is_min else third & 0x0F) | (first >> 2 & 0x30)], axis=-1
    )


def _signed_six_bits(packed: Bytes) -> NDArray[np.int8]:
    """Unpacks six-bit numbers, `[..., 12]` to `[..., 16]`. Source: ggml's dequantize_row_q3_K.

    The low four bits of numbers 0-7 are the low nibbles of bytes 0-7, those of 8-15 the high ones;
    bytes 8-11 hold the top two bits of four numbers each.
    """
    low = np.concatenate([packed[..., :8] & 0x0F, packed[..., :8] >> 4], axis=-1)
    high = np.concatenate([packed[..., 8:] >> np.uint8(2 * i) & 3 for i in range(4)], axis=-1)
    numbers: NDArray[np.int8] = (low | high << np.uint8(4)).astype(np.int8) - np.int8(32)
    return numbers


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Layout of codes, scales and mins in a block.

    value = (code - zero_point) * scale + min, as in `PackedWeight`; 8-bit codes are signed.
    """

    planes: tuple[Plane, ...]
    scales: Numbers
    mins: Numbers | None = None
    super_scales: Numbers | None = None
    super_mins: Numbers | None = None
    zero_point: int = 0

    @property
    def bits(self) -> int:
        return sum(plane.bits for plane in self.planes)


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A matrix `[..., out, in]` stored as `blocks [..., out, blocks, bytes]`, a view into the file.

    Each block holds `block_size` inputs.
    """

    blocks: Bytes
    block_size: int
    layout: BlockLayout

    is_float = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.blocks.shape[:-2], self.blocks.shape[-2] * self.block_size)

    @property
    def group(self) -> int:
        """Inputs per scale."""
        return self.block_size // self.layout.scales.per_block

    def rows(self, index: slice | NDArray[np.intp]) -> PackedWeight | BlockWeight:
        return (
            self.packed().rows(index)
            if self.blocks.ndim < 3
            else replace(self, blocks=self.blocks[..., index, :, :])
        )

    def matrix(self, index: int) -> BlockWeight:
        return replace(self, blocks=self.blocks[index])

    def matrices(self, first: int, last: int) -> BlockWeight:
        return replace(self, blocks=self.blocks[first:last])

    def inputs(self, first: int, last: int) -> BlockWeight:
        """Returns complete blocks of inputs, as `PackedWeight.inputs` does."""
        if first % self.block_size or last % self.block_size:
            raise ValueError(
                f"inputs {first} to {last} cannot be cut from a weight of groups of"
                f" {self.block_size}"
            )
        return replace(
            self, blocks=self.blocks[..., first // self.block_size : last // self.block_size, :]
        )

    def dequantize(self) -> NDArray[np.float32]:
        return self.packed().dequantize()

    def packed(self) -> PackedWeight:
        """Unpacks the blocks into arrays of codes, scales and mins."""
        layout, codes = self.layout, self._codes()
        mins = None
        if layout.mins is not None:
            supers = None if layout.super_mins is None else layout.super_mins.unpack(self.blocks)
            mins = Levels(
                layout.mins.unpack(self.blocks),
                -supers if supers is not None and layout.mins.kind in NUM_SHARED else supers,
            )
        return PackedWeight(
            shape=self.shape,
            bits=max(4, layout.bits),
            code="int" if layout.bits == 8 else "uint",
            codes=codes.view(np.int8) if layout.bits == 8 else codes,
            group=self.group,
            scales=Levels(
                layout.scales.unpack(self.blocks),
                None if layout.super_scales is None else layout.super_scales.unpack(self.blocks),
            ),
            mins=mins,
            zero_point=layout.zero_point,
            nibbles="halves",
            activation="per_group",
        )

    def _codes(self) -> Bytes:
        """Returns the codes `[..., out, in]`, or `[..., out, in / 2]` as nibbles in halves of
        groups.
        """
        lead = self.blocks.shape[:-2]
        half = self.group // 2
        planes = self.layout.planes
        if len(planes) == 1 and (
            planes[0].bits == 8 or planes[0] == Plane(planes[0].start, 4, half)
        ):
            return _side_by_side(
                self.blocks, planes[0].start, self.block_size * planes[0].bits // 8
            ).reshape(*lead, -1)
        codes = _join(self.blocks, self.block_size, planes)
        if self.layout.bits > 4:
            return codes.reshape(*lead, -1)
        pairs = codes.reshape(*lead, -1, 2, half)
        return (pairs[..., 0, :] | pairs[..., 1, :] << np.uint8(4)).reshape(*lead, -1)


StoredWeight = PackedWeight | BlockWeight


def _join(blocks: Bytes, block_size: int, planes: Sequence[Plane]) -> Bytes:
    """Combines bit planes into the codes of every block, `[..., blocks, block_size]`."""
    codes, low = np.zeros((*blocks.shape[:-1], block_size), np.uint8), 0
    for plane in planes:
        part = blocks[..., plane.start : plane.start + block_size * plane.bits // 8]
        shifts = np.arange(0, 8, plane.bits, dtype=np.uint8)[:, None]
        bits = part.reshape(*blocks.shape[:-1], -1, 1, plane.run) >> shifts & np.uint8(
            (1 << plane.bits) - 1
        )
        codes |= bits.reshape(codes.shape) << np.uint8(low)
        low += plane.bits
    return codes


def _side_by_side(blocks: Bytes, start: int, num_bytes: int) -> Bytes:
    """Copies a byte range of every block into one contiguous array.

    NumPy copies 16-byte elements 6x faster than rows of 16 bytes (92 MB: 17 ms instead of 100 ms);
    complex128 serves only as a 16-byte type.
    """
    part = blocks[..., start : start + num_bytes]
    return np.ascontiguousarray(part.view(np.complex128) if num_bytes % 16 == 0 else part).view(
        np.uint8
    )
