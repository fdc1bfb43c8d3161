"""Grouped integer codes with a scale and a zero per group: value = (code - zero) * scale.

GPTQ, AWQ and compressed-tensors share this form. Makes packed weights from unpacked arrays; a zero
common to all groups becomes the weight's zero point.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel
from octavo.quant.packed import Levels, PackedWeight

SCALE_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
MIDDLE_OF_8 = 128
GROUP_UNIT = 32
"""If each row is a single group, its length is padded to a multiple of this, so that kernels can
split it.
"""


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A matrix `[out, in]` as stored, with codes unpacked to bytes."""

    codes: NDArray[np.uint8]
    """Unsigned codes, `[out, in]`."""
    bits: int
    """Bits per code, 2 to 8."""
    scales: NDArray
    """`[out, groups]` fp16, bf16 or fp32"""
    zeros: NDArray[np.int16]
    """`[out, groups]`, 0 to 2 ** bits"""
    group: int
    """Inputs per group; the last group may be shorter."""
    permutation: NDArray[np.int32] | None = None
    """Original input index of each column of `codes` (act-order); None: unpermuted."""


def grouped_weight(grouped: GroupedCodes) -> PackedWeight:
    """Makes the packed weight: 4-bit codes if `bits` <= 4, otherwise bytes."""
    zero = common_zero(grouped.zeros)
    is_narrow = grouped.bits <= 4
    width = grouped.codes.shape[-1]
    middle = 0 if is_narrow else MIDDLE_OF_8
    return PackedWeight(
        grouped.codes.shape,
        4 if is_narrow else 8,
        "uint",
        _nibbles(grouped.codes) if is_narrow else grouped.codes,
        grouped.group if grouped.group < width else -(-width // GROUP_UNIT) * GROUP_UNIT,
        Levels(grouped.scales),
        zeros=None if zero is not None else _beyond(grouped.zeros, middle),
        zero_point=middle if zero is None else zero,
        input_permutation=grouped.permutation,
        activation="per_group",
    )


def grouped_name(bits: int, scales: np.dtype, group: int, *, has_zeros: bool) -> str:
    """Returns the format name of grouped codes, e.g. "U4_F16:128".

    It consists of the bits in memory, `Z` for per-group zeros, the scale dtype and the group size.
    """
    zeros = "Z" if has_zeros else ""
    return f"U{4 if bits <= 4 else 8}{zeros}_{SCALE_NAMES[scales.name]}:{group}"


def common_zero(zeros: NDArray[np.int16]) -> int | None:
    """Returns the zero that all groups share; None if they differ."""
    first = int(zeros.flat[0]) if zeros.size else 0
    return first if (zeros == first).all() else None


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Packs two neighbouring codes per byte, the first in the low nibble; odd rows are padded."""
    if codes.shape[-1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return np.bitwise_or(codes[..., ::2], np.left_shift(codes[..., 1::2], 4))


def _beyond(zeros: NDArray[np.int16], zero_point: int) -> NDArray[np.int8]:
    """Subtracts a zero point.

    Raises UnsupportedModel for 256, which GPTQ's first version can encode.
    """
    rest = zeros - np.int16(zero_point)
    if rest.size and not -MIDDLE_OF_8 <= int(rest.min()) <= int(rest.max()) < MIDDLE_OF_8:
        raise UnsupportedModel(
            f"got 8-bit zero points from {zeros.min()} to {zeros.max()}, expected 0 to 255"
        )
    return rest.astype(np.int8)
