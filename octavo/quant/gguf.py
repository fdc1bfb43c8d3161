"""GGUF's tensor types as packed weights: rows of blocks in, codes, scales and mins out, lossless.

Owns the byte layout of each block type; knows nothing of files, names or models (`checkpoint/gguf.py`).
Source of the layouts: ggml's `ggml-common.h` (block structs); the oracle of the tests is gguf-py's `dequantize`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.quant.packed import Levels, NibbleOrder, PackedWeight

Bytes = NDArray[np.uint8]

SUPER_BLOCK = 256
"""Inputs in a k-quant's block."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type: `block_bytes` bytes hold `block_size` neighbouring inputs.

    `unpack(blocks [..., out, blocks, block_bytes] uint8) -> PackedWeight` of a matrix; None where the bytes are plain floats.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype | None = None
    unpack: Callable[[Bytes], PackedWeight] | None = None

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // self.block_size * self.block_bytes

    def packed(self, raw: Bytes, shape: tuple[int, ...]) -> PackedWeight:
        """The tensor in `raw [num_bytes(shape)]`: a view for floats, small copies for blocks. `shape[-1]` fills whole blocks."""
        if self.dtype is not None:
            return PackedWeight.plain(raw.view(self.dtype).reshape(shape))
        assert self.unpack is not None
        return self.unpack(raw.reshape(*shape[:-1], shape[-1] // self.block_size, self.block_bytes))


def _gather(blocks: Bytes, start: int, stop: int) -> Bytes:
    """Bytes start..stop of every block, copied side by side: `[..., out, blocks * (stop - start)]`.

    Numpy copies 16-byte elements six times as fast as rows of 16 bytes (92 MB: 17 ms, not 100 ms); complex128 only names their size.
    """
    part = blocks[..., start:stop]
    if (stop - start) % 16 == 0:
        part = part.view(np.complex128)
    copied = np.ascontiguousarray(part).view(np.uint8)
    return copied.reshape(*copied.shape[:-2], -1)


def _half(blocks: Bytes, start: int) -> NDArray[np.float16]:
    """The fp16 at byte `start` of every block: `[..., out, blocks]`."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """Low nibbles, then high ones: `[..., n]` to `[..., 2, n]`."""
    return np.stack([packed & 0x0F, packed >> 4], axis=-2)


def _weight(
    codes: NDArray,
    group: int,
    scales: Levels,
    mins: Levels | None = None,
    *,
    bits: int = 8,
    zero_point: int = 0,
    nibbles: NibbleOrder = "pairs",
) -> PackedWeight:
    """Codes `[..., out, in]` (4 bits: `[..., out, in / 2]`) with what belongs to them."""
    width = codes.shape[-1] * (2 if bits == 4 else 1)
    return PackedWeight(
        shape=(*codes.shape[:-1], width),
        bits=bits,
        code="int" if codes.dtype == np.int8 else "uint",
        codes=codes,
        group=group,
        scales=scales,
        mins=mins,
        zero_point=zero_point,
        nibbles=nibbles,
        activation="per_group",
    )


def _q4_0(blocks: Bytes) -> PackedWeight:
    """fp16 d, 16 bytes of nibbles in halves; value = d * (q - 8)."""
    return _weight(_gather(blocks, 2, 18), 32, Levels(_half(blocks, 0)), bits=4, zero_point=8, nibbles="halves")


def _q4_1(blocks: Bytes) -> PackedWeight:
    """fp16 d, fp16 m, 16 bytes of nibbles in halves; value = d * q + m."""
    return _weight(_gather(blocks, 4, 20), 32, Levels(_half(blocks, 0)), Levels(_half(blocks, 2)), bits=4, nibbles="halves")


def _five_bits(blocks: Bytes, high: int) -> Bytes:
    """Codes of Q5_0 and Q5_1 `[..., out, in]`: 4 bytes of fifth bits at byte `high`, then 16 bytes of nibbles in halves."""
    fifth = np.unpackbits(blocks[..., high : high + 4], axis=-1, bitorder="little")
    low = _nibbles(blocks[..., high + 4 : high + 20])
    codes = low.reshape(fifth.shape) | (fifth << np.uint8(4))
    return codes.reshape(*codes.shape[:-2], -1)


def _q5_0(blocks: Bytes) -> PackedWeight:
    """fp16 d, fifth bits, nibbles; value = d * (q - 16)."""
    return _weight(_five_bits(blocks, 2).view(np.int8) - np.int8(16), 32, Levels(_half(blocks, 0)), bits=5)


def _q5_1(blocks: Bytes) -> PackedWeight:
    """fp16 d, fp16 m, fifth bits, nibbles; value = d * q + m."""
    return _weight(_five_bits(blocks, 4), 32, Levels(_half(blocks, 0)), Levels(_half(blocks, 2)), bits=5)


def _q8_0(blocks: Bytes) -> PackedWeight:
    """fp16 d, 32 int8; value = d * q."""
    return _weight(_gather(blocks, 2, 34).view(np.int8), 32, Levels(_half(blocks, 0)))


def _k_levels(blocks: Bytes) -> tuple[Levels, Levels]:
    """Scales and mins of Q4_K and Q5_K: fp16 d, fp16 dmin, 12 bytes of 8 six-bit scales and 8 six-bit mins; min = -dmin * m.

    Groups 0-3 hold scale and min in the low six bits of bytes 0-3 and 4-7; groups 4-7 take their low nibbles from bytes 8-11
    (scale low, min high) and their top two bits from the top of bytes 0-3 and 4-7.
    """
    first, second, third = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | (first >> 2 & 0x30)], axis=-1)
    mins = np.concatenate([second & 0x3F, (third >> 4) | (second >> 2 & 0x30)], axis=-1)
    rows = (*blocks.shape[:-2], -1)
    return Levels(scales.reshape(rows), _half(blocks, 0)), Levels(mins.reshape(rows), -_half(blocks, 2))


def _q4_k(blocks: Bytes) -> PackedWeight:
    """Two-level scales and mins, then 4 times 32 bytes: low nibbles are one group of 32, high nibbles the next.

    Codes are laid anew, each group's 16 bytes in halves, so that kernels know one order of 4-bit codes.
    """
    scales, mins = _k_levels(blocks)
    pairs = blocks[..., 16:144].reshape(*blocks.shape[:-1], 4, 2, 16)
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    codes = np.stack([(first & 0x0F) | (second << 4), (first >> 4) | (second & 0xF0)], axis=-2)
    return _weight(codes.reshape(*blocks.shape[:-2], -1), 32, scales, mins, bits=4, nibbles="halves")


def _q5_k(blocks: Bytes) -> PackedWeight:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte j belongs to input j of group g."""
    scales, mins = _k_levels(blocks)
    low = _nibbles(blocks[..., 48:176].reshape(*blocks.shape[:-1], 4, 32)).reshape(*blocks.shape[:-1], 8, 32)
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _weight((low | (fifth << 4)).reshape(*blocks.shape[:-2], -1), 32, scales, mins, bits=5)


def _q6_k(blocks: Bytes) -> PackedWeight:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales of groups of 16, fp16 d; value = d * scale * (q - 32)."""
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)).reshape(*blocks.shape[:-1], 8, 32)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | (pairs.reshape(low.shape) << 4)).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    rows = (*blocks.shape[:-2], -1)
    return _weight(codes.reshape(rows), 16, Levels(scales.reshape(rows), _half(blocks, 208)), bits=6)


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, dtype=np.dtype(np.float32)),
    1: BlockType("F16", 1, 2, dtype=np.dtype(np.float16)),
    2: BlockType("Q4_0", 32, 18, unpack=_q4_0),
    3: BlockType("Q4_1", 32, 20, unpack=_q4_1),
    6: BlockType("Q5_0", 32, 22, unpack=_q5_0),
    7: BlockType("Q5_1", 32, 24, unpack=_q5_1),
    8: BlockType("Q8_0", 32, 34, unpack=_q8_0),
    12: BlockType("Q4_K", SUPER_BLOCK, 144, unpack=_q4_k),
    13: BlockType("Q5_K", SUPER_BLOCK, 176, unpack=_q5_k),
    14: BlockType("Q6_K", SUPER_BLOCK, 210, unpack=_q6_k),
    30: BlockType("BF16", 1, 2, dtype=np.dtype(ml_dtypes.bfloat16)),
}
"""By ggml's type number."""
