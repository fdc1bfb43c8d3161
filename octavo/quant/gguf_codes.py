"""Decoders for GGUF's nonlinear tensor types: 4-bit codebooks, vector codebooks with signs, ternary
digits, and low-bit scales.

Each type has at most sixteen distinct integers, so it is converted without loss to 4-bit codes that
index a lookup table, with a scale per 16 or more inputs. Source: ggml's `ggml-common.h`; tests
compare with gguf-py's `dequantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.quant.codebooks import CODEBOOKS, codebook
from octavo.quant.packed import Levels, NibbleOrder, PackedWeight

Bytes = NDArray[np.uint8]
LevelKind = Literal["fp16", "fp32", "small"]
"""Scale storage: floats, or signed bytes with a factor per block."""


class Decoded(NamedTuple):
    """Decoded blocks."""

    codes: NDArray
    """Integers `[blocks, inputs] int8`, or lookup indices `[blocks, inputs / 2] uint8`."""
    scales: NDArray
    """`[blocks, groups]`"""
    factors: NDArray[np.float32] | None = None
    """Factor of each block's scales, `[blocks, 1]`; None: single-level scales."""


LEVEL_TYPES: dict[LevelKind, np.dtype] = {
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "small": np.dtype(np.int8),
}

WIDE = 256
NONLINEAR = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.float32
)
"""Codebook of IQ4_NL and IQ4_XS."""
TWICE_E2M1 = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.float32)
CHUNK_BLOCKS = 1 << 13
"""Number of blocks decoded at a time, so that temporaries take only a few megabytes."""


class CodeLayout(NamedTuple):
    """Decoding of the blocks of a type."""

    decode: Callable[[Bytes], Decoded]
    group: int
    """Inputs per scale."""
    lookup: NDArray[np.float32]
    """Values of the sixteen codes."""
    levels: LevelKind = "small"
    nibbles: NibbleOrder = "pairs"

    @property
    def form(self) -> str:
        """Name of the packed format: lookup codes with their kind of scales."""
        if self.levels == "small":
            return f"L4I_K{self.group}:{WIDE}"
        return f"L4I_{self.levels.upper().replace('P', '')}:{self.group}"

    def weight(self, raw: Bytes, shape: tuple[int, ...], block: tuple[int, int]) -> PackedWeight:
        """Decodes a tensor; `block` is the number of inputs and bytes per block."""
        size, num_bytes = block
        blocks = raw.reshape(-1, num_bytes)
        codes = np.empty((len(blocks), size // 2), np.uint8)
        indices = _make_inverse_lookup(self.lookup)
        scales = np.empty((len(blocks), size // self.group), LEVEL_TYPES[self.levels])
        factors = np.empty((len(blocks), 1), np.float32) if self.levels == "small" else None
        for start in range(0, len(blocks), CHUNK_BLOCKS):
            part = slice(start, start + CHUNK_BLOCKS)
            with np.errstate(invalid="ignore", over="ignore"):  # scales of a damaged file
                decoded, scales[part], own = self.decode(blocks[part])
            if factors is not None:
                factors[part] = own
            codes[part] = (
                _pair(indices[decoded.view(np.uint8)]) if decoded.dtype == np.int8 else decoded
            )
        levels = Levels(
            scales.reshape(*shape[:-1], shape[-1] // self.group),
            None if factors is None else factors.reshape(*shape[:-1], -1),
        )
        return PackedWeight(
            shape,
            4,
            "lookup",
            codes.reshape(*shape[:-1], shape[-1] // 2),
            self.group,
            levels,
            nibbles=self.nibbles,
            lookup=self.lookup,
            activation="per_group",
        )


def _make_inverse_lookup(lookup: NDArray[np.float32]) -> Bytes:
    """Returns the lookup index of each signed byte; 0 for values that the lookup lacks."""
    indices = np.zeros(256, np.uint8)
    numbers = lookup.astype(np.int8).view(np.uint8)
    indices[numbers[::-1]] = np.arange(len(numbers), dtype=np.uint8)[::-1]
    return indices


def _pair(codes: Bytes) -> Bytes:
    """Packs two codes per byte, the first in the low nibble."""
    pairs: Bytes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return pairs


class _Parts:
    """Reads a block's bytes field by field."""

    def __init__(self, blocks: Bytes) -> None:
        self._blocks = blocks
        self._at = 0

    def take(self, count: int, dtype: str = "u1") -> NDArray:
        part = self._blocks[:, self._at : self._at + count]
        self._at += count
        return np.ascontiguousarray(part).view(dtype)

    def half(self, share: float = 1) -> NDArray[np.float32]:
        """Reads an fp16 and scales it by a power of two: `[blocks, 1]`."""
        scale: NDArray[np.float32] = self.take(2, "<f2").astype(np.float32) * np.float32(share)
        return scale


def _fields(words: NDArray, bits: int, count: int) -> NDArray:
    """Returns the `count` lowest bit fields of each word, `[blocks, words, count]`."""
    shifts = np.arange(count, dtype=words.dtype) * words.dtype.type(bits)
    fields: NDArray = words[..., None] >> shifts & words.dtype.type((1 << bits) - 1)
    return fields


def _runs(part: Bytes, bits: int, run: int) -> Bytes:
    """Unpacks codes; every `run` bytes hold 8 / bits runs, low bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = part.reshape(len(part), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(part), -1)


def _iq4_nl(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    scale = parts.take(2, "<f2")
    return Decoded(parts.take(16), scale)


def _iq4_xs(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    scale, high = parts.half(), parts.take(2, "<u2")
    low = _fields(parts.take(4), 4, 2).reshape(len(blocks), -1)
    whole = low | (_fields(high, 2, 8).reshape(len(blocks), -1) << 4).astype(np.uint8)
    return Decoded(parts.take(128), whole.astype(np.int8) - np.int8(32), scale)


def _mxfp4(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    exponents = parts.take(1).astype(np.int32)
    # Half of 2 ** (e - 127): codes stand for twice the e2m1 value, which is an integer.
    scale = np.ldexp(np.float32(1), exponents - 128).astype(np.float32)
    return Decoded(parts.take(16), scale)


def _half_e4m3() -> NDArray[np.float16]:
    """Returns half of each unsigned e4m3 value, which fits fp16; 0 for 127 (NaN)."""
    codes = np.arange(256)
    exponent, rest = codes >> 3 & 15, (codes & 7).astype(np.float64)
    normal = (1 + rest / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, rest * 2.0**-9, normal) / 2
    return np.where(codes == 127, 0, values).astype(np.float16)


HALF_E4M3 = _half_e4m3()


def _nvfp4(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    scales = HALF_E4M3[parts.take(4)]
    return Decoded(_pair(_runs(parts.take(32), 4, 8)), scales)


def _tq1_0(blocks: Bytes) -> Decoded:
    """Decodes five ternary digits per byte: each is the top of the byte times a power of 3."""
    parts = _Parts(blocks)
    digits = [
        (part.reshape(len(blocks), -1, 1, run) * powers[:, None]).reshape(len(blocks), -1)
        for part, run, powers in (
            (parts.take(32), 32, np.array([1, 3, 9, 27, 81], np.uint8)),
            (parts.take(16), 16, np.array([1, 3, 9, 27, 81], np.uint8)),
            (parts.take(4), 4, np.array([1, 3, 9, 27], np.uint8)),
        )
    ]
    codes = np.concatenate(digits, axis=1).astype(np.uint16) * 3 >> 8
    return Decoded(codes.astype(np.int8) - np.int8(1), parts.take(2, "<f2"))


def _tq2_0(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    codes = _runs(parts.take(64), 2, 32).astype(np.int8) - np.int8(1)
    return Decoded(codes, parts.take(2, "<f2"))


def _parity_signs() -> NDArray[np.int8]:
    """Returns eight signs for each 7-bit index; the number of minus signs is even."""
    bits = np.arange(128)[:, None] >> np.arange(7) & 1
    whole = np.concatenate([bits, bits.sum(axis=1, keepdims=True) & 1], axis=1)
    return np.where(whole, -1, 1).astype(np.int8)


PARITY_SIGNS = _parity_signs()


def _signs(part: Bytes) -> NDArray[np.int8]:
    """Returns the sign of each bit, `[blocks, bits]`."""
    bits = np.unpackbits(part, axis=1, bitorder="little")
    return np.where(bits, -1, 1).astype(np.int8)


def _vectors(name: str, indices: NDArray, signs: NDArray[np.int8]) -> NDArray[np.int8]:
    """Looks up codebook vectors and applies signs, `[blocks, inputs]`."""
    vectors: NDArray[np.int8] = codebook(name)[indices].reshape(len(indices), -1)
    return vectors * signs.reshape(vectors.shape)


def _odd(steps: NDArray) -> NDArray[np.int8]:
    """Returns 2 n + 1: scale steps start at one half."""
    odd: NDArray[np.int8] = steps.astype(np.int8) * np.int8(2) + np.int8(1)
    return odd


def _iq2_xxs(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    scale, words = parts.half(1 / 8), parts.take(64, "<u4").reshape(len(blocks), -1, 2)
    indices = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    signs = PARITY_SIGNS[_fields(words[..., 1], 7, 4)]
    steps = words[..., 1] >> np.uint32(28)
    codes = _vectors("IQ2_XXS", indices.reshape(len(blocks), -1), signs)
    return Decoded(codes, _odd(steps), scale)


def _iq2_xs(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    scale, words = parts.half(1 / 8), parts.take(64, "<u2")
    steps = _fields(parts.take(8), 4, 2).reshape(len(blocks), -1)
    codes = _vectors("IQ2_XS", words & 511, PARITY_SIGNS[words >> 9])
    return Decoded(codes, _odd(steps), scale)


def _iq2_s(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    scale = parts.half(1 / 8)
    low = parts.take(32)
    signs = _signs(parts.take(32))
    high = _fields(parts.take(8), 2, 4).reshape(len(blocks), -1).astype(np.uint16)
    steps = _fields(parts.take(8), 4, 2).reshape(len(blocks), -1)
    return Decoded(_vectors("IQ2_S", low | high << 8, signs), _odd(steps), scale)


def _iq3_xxs(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    scale = parts.half(1 / 4)
    indices = parts.take(64)
    words = parts.take(32, "<u4")
    signs = PARITY_SIGNS[_fields(words, 7, 4)]
    return Decoded(_vectors("IQ3_XXS", indices, signs), _odd(words >> np.uint32(28)), scale)


def _iq3_s(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    scale, low = parts.half(), parts.take(64)
    high = np.unpackbits(parts.take(8), axis=1, bitorder="little").astype(np.uint16)
    signs = _signs(parts.take(32))
    steps = _fields(parts.take(4), 4, 2).reshape(len(blocks), -1)
    return Decoded(_vectors("IQ3_S", low | high << 8, signs), _odd(steps), scale)


EIGHTH = 0.125
"""Step of the IQ1 types: values are a ternary digit plus or minus an eighth."""


def _eighths(indices: NDArray, is_minus: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Returns 8 * (digit plus or minus an eighth), `[blocks, inputs]`; one sign per vector."""
    digits: NDArray[np.int8] = codebook("IQ1_S")[indices] * np.int8(8)
    digits += np.where(is_minus, np.int8(-1), np.int8(1))[..., None]
    return digits.reshape(len(indices), -1)


def _iq1_s(blocks: Bytes) -> Decoded:
    parts = _Parts(blocks)
    scale = parts.half(EIGHTH)
    low = parts.take(32)
    words = parts.take(16, "<u2")
    high = _fields(words, 3, 4).reshape(len(blocks), -1)
    is_minus = np.repeat(words & np.uint16(0x8000) != 0, 4, axis=1)
    steps = words >> np.uint16(12) & np.uint16(7)
    return Decoded(_eighths(low | high << np.uint16(8), is_minus), _odd(steps), scale)


def _iq1_m(blocks: Bytes) -> Decoded:
    """Decodes blocks that store the fp16 scale in the top four bits of four words."""
    parts = _Parts(blocks)
    low, high, words = parts.take(32), parts.take(16), parts.take(8, "<u2")
    bits = np.bitwise_or.reduce(
        (words >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16), axis=1, keepdims=True
    )
    scale = bits.astype(np.uint16).view(np.float16).astype(np.float32) * np.float32(EIGHTH)
    steps = _fields(words, 3, 4).reshape(len(blocks), -1)
    nibbles = _fields(high, 4, 2).reshape(len(blocks), -1)
    indices = low | (nibbles & 7).astype(np.uint16) << 8
    return Decoded(_eighths(indices, nibbles & 8 != 0), _odd(steps), scale)


EIGHTHS = (-9, -7, -1, 1, 7, 9)
"""Eight times a ternary digit plus or minus an eighth."""


def _table(numbers: Iterable[int]) -> NDArray[np.float32]:
    """Returns a lookup of sixteen values, padded with the last one."""
    values = sorted(numbers)
    return np.array([*values, *[values[-1]] * (16 - len(values))], np.float32)


def _add_signs(name: str) -> NDArray[np.float32]:
    """Returns a codebook's levels with both signs, at most sixteen."""
    magnitudes = CODEBOOKS[name].levels
    return _table([*magnitudes, *(-level for level in magnitudes)])


CODE_LAYOUTS: dict[str, CodeLayout] = {
    "IQ2_XXS": CodeLayout(_iq2_xxs, 32, _add_signs("IQ2_XXS")),
    "IQ2_XS": CodeLayout(_iq2_xs, 16, _add_signs("IQ2_XS")),
    "IQ2_S": CodeLayout(_iq2_s, 16, _add_signs("IQ2_S")),
    "IQ3_XXS": CodeLayout(_iq3_xxs, 32, _add_signs("IQ3_XXS")),
    "IQ3_S": CodeLayout(_iq3_s, 32, _add_signs("IQ3_S")),
    "IQ1_S": CodeLayout(_iq1_s, 32, _table(EIGHTHS)),
    "IQ1_M": CodeLayout(_iq1_m, 16, _table(EIGHTHS)),
    "IQ4_NL": CodeLayout(_iq4_nl, 32, NONLINEAR, "fp16", "halves"),
    "IQ4_XS": CodeLayout(_iq4_xs, 32, NONLINEAR, "small", "halves"),
    "TQ1_0": CodeLayout(_tq1_0, 256, _table(range(-1, 2)), "fp16"),
    "TQ2_0": CodeLayout(_tq2_0, 256, _table(range(-1, 3)), "fp16"),
    "MXFP4": CodeLayout(_mxfp4, 32, TWICE_E2M1, "fp32", "halves"),
    "NVFP4": CodeLayout(_nvfp4, 16, TWICE_E2M1, "fp16"),
}
