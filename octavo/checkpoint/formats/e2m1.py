"""4-bit floats (e2m1) with a scale per 16 or 32 inputs: NVFP4 and MXFP4.

Codes stand for twice their value, an integer from -12 to 12. Scales are halved, which is exact, so
the weights do not change. Sources: OCP Microscaling Formats 1.0 (MXFP4, e8m0 scales), NVIDIA's
NVFP4 as saved by compressed-tensors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.formats.format import (
    FLOATS,
    Described,
    Tensors,
    check_shape,
    check_type,
    get_required,
)
from octavo.quant.fp8 import e8m0
from octavo.quant.packed import Levels, PackedWeight

TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the value of each code; the highest bit is the sign."""


SCALES = ("uint8", "float8_e4m3fn", *FLOATS)
"""Types of scales: powers of two as e8m0 (uint8), or floats."""


def decode_half_e8m0(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Returns half of each power of two; NaN for 255."""
    return e8m0(exponents, less=1)


def e2m1_weight(pairs: NDArray[np.uint8], halves: NDArray[np.float32], group: int) -> PackedWeight:
    """Returns the packed weight of codes `[..., out, in / 2]`, two per byte with the first one low,
    and halved scales `[..., out, groups]`.
    """
    return PackedWeight(
        (*pairs.shape[:-1], 2 * pairs.shape[-1]),
        4,
        "lookup",
        pairs,
        group,
        Levels(halves),
        lookup=TWICE,
        activation="per_group",
    )


def e2m1_name(group: int) -> str:
    """Returns the format name for backends."""
    return f"L4I_F32:{group}"


def describe_e2m1(module: str, tensors: Tensors, group: int) -> Described:
    return Described(_shape(module, tensors, group), e2m1_name(group))


def read_e2m1(module: str, tensors: Tensors, group: int) -> PackedWeight:
    """Returns the packed weight of a compressed-tensors module; scales are divided by its global
    scale.
    """
    _shape(module, tensors, group)
    scales = tensors["weight_scale"]
    if scales.dtype == np.uint8:
        halves = decode_half_e8m0(scales)
    else:
        whole = tensors["weight_global_scale"]
        halves = scales.astype(np.float32) / whole.astype(np.float32).item() * np.float32(0.5)
    return e2m1_weight(tensors["weight_packed"], halves, group)


def _shape(module: str, tensors: Tensors, group: int) -> tuple[int, int]:
    pairs = get_required(tensors, "weight_packed", module)
    if pairs.ndim != 2 or pairs.dtype != np.uint8 or pairs.shape[1] * 2 % group:
        raise WeightMismatch(
            f"{module}.weight_packed is {pairs.dtype} of shape {pairs.shape}, expected pairs of"
            f" codes, uint8 [out, in / 2], in groups of {group}"
        )
    shape = (pairs.shape[0], pairs.shape[1] * 2)
    expected = (shape[0], shape[1] // group)
    scales = get_required(tensors, "weight_scale", module)
    check_shape(scales, expected, "weight_scale", module, f"groups of {group} inputs")
    check_type(scales, SCALES, "weight_scale", module)
    if scales.dtype.name != "uint8":
        whole = get_required(tensors, "weight_global_scale", module)
        check_shape(whole.reshape(-1), (1,), "weight_global_scale", module, "one for the matrix")
        check_type(whole, FLOATS, "weight_global_scale", module)
    return shape
