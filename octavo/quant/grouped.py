"""Integer codes in groups of neighbouring inputs, each with a scale and a zero: value = (code -
zero) * scale, as GPTQ, AWQ and compressed-tensors have it.

Makes the packed weight of unpacked arrays, and the name by which backends know its form; knows no
file format. A zero that all groups share is the weight's zero point.
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
"""Inputs of which the one group of a whole row is a multiple, so that kernels can cut it."""


@dataclass(frozen=True, slots=True)
class GroupedCodes:
    """A matrix `[out, in]` as stored, unpacked but for its codes' bits."""

    codes: NDArray[np.uint8]
    """Codes from 0 up, one a byte, `[out, in]`."""
    bits: int
    """Bits of a code, 2 to 8."""
    scales: NDArray
    """Scales, `[out, groups]` fp16, bf16 or fp32."""
    zeros: NDArray[np.int16]
    """Zeros, `[out, groups]`, from 0 to 2 ** bits."""
    group: int
    """Inputs of a group; the last may be shorter."""
    permutation: NDArray[np.int32] | None = None
    """Input of each column of `codes`, where groups are of inputs that do not lie side by side."""


def grouped_weight(found: GroupedCodes) -> PackedWeight:
    """Makes the packed weight: codes of 4 bits where these do, otherwise bytes."""
    zero = common_zero(found.zeros)
    is_narrow = found.bits <= 4
    width = found.codes.shape[-1]
    middle = 0 if is_narrow else MIDDLE_OF_8
    return PackedWeight(
        found.codes.shape,
        4 if is_narrow else 8,
        "uint",
        _nibbles(found.codes) if is_narrow else found.codes,
        found.group if found.group < width else -(-width // GROUP_UNIT) * GROUP_UNIT,
        Levels(found.scales),
        zeros=None if zero is not None else _beyond(found.zeros, middle),
        zero_point=middle if zero is None else zero,
        input_permutation=found.permutation,
        activation="per_group",
    )


def grouped_name(bits: int, scales: np.dtype, group: int, *, has_zeros: bool) -> str:
    """Returns the name of a form of grouped codes, e.g. "U4_F16:128": bits of a code in memory,
    `Z` where groups have zeros of their own, the scales' type, inputs of a group.
    """
    zeros = "Z" if has_zeros else ""
    return f"U{4 if bits <= 4 else 8}{zeros}_{SCALE_NAMES[scales.name]}:{group}"


def common_zero(zeros: NDArray[np.int16]) -> int | None:
    """Returns the zero of all groups; None where they differ."""
    first = int(zeros.flat[0]) if zeros.size else 0
    return first if (zeros == first).all() else None


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Packs two neighbouring codes a byte, the first one low; a code is added to an odd row."""
    if codes.shape[-1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return np.bitwise_or(codes[..., ::2], np.left_shift(codes[..., 1::2], 4))


def _beyond(zeros: NDArray[np.int16], zero_point: int) -> NDArray[np.int8]:
    """Returns zeros less a zero point; 256, which GPTQ's first version can mean, is refused."""
    rest = zeros - np.int16(zero_point)
    if rest.size and not -MIDDLE_OF_8 <= int(rest.min()) <= int(rest.max()) < MIDDLE_OF_8:
        raise UnsupportedModel(
            f"zeros of 8 bits go from {zeros.min()} to {zeros.max()}, supported are 0 to 255"
        )
    return rest.astype(np.int8)
