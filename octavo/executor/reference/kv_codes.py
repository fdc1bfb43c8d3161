"""Rounding to codes of 4 bits: a rotation, and a codebook times a scale per row.

Each vector of a head is multiplied by a Hadamard matrix and its numbers are rounded to the levels
of a normal distribution's optimal quantizer (Max 1960). All sums are in fp32 and in the order of
the kernels (csrc/kernels/kv_codes.inl), so that both choose the same codes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.executor.reference.step import Floats

LEVELS = np.array([6, 18, 31, 44, 58, 75, 96, 127], np.float32)
"""Levels of one sign."""

BOUNDS = (LEVELS[1:] + LEVELS[:-1]) / np.float32(2)
UNIT = np.float32(0.0215165)
"""Size of a level if the numbers' root mean square is 1."""

LANES = 16
"""Number of partial sums, which are added as a tree."""


def as_int4(numbers: Floats) -> Floats:
    """Returns the levels nearest to the rotated rows of the last axis, times the scale with the
    least squared error, rotated back; NaN for a row that is not finite.
    """
    if numbers.shape[-1] == 0:
        return numbers
    with np.errstate(all="ignore"):
        x = _rotate(numbers.astype(np.float32))
        squares = _sum(x * x)
        step = np.sqrt(squares / np.float32(x.shape[-1])) * UNIT
        sizes = LEVELS[(abs(x) / step > BOUNDS[:, *(None,) * x.ndim]).sum(axis=0)]
        scale = _sum(abs(x) * sizes) / _sum(sizes * sizes)
        scale = np.where(np.isfinite(squares), scale, np.float32(np.nan))
        scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
        stored = _rotate(np.copysign(sizes, x) * scale) / np.float32(_rotation_size(x.shape[-1]))
    return stored.astype(np.float64)


def _rotation_size(width: int) -> int:
    """Returns the size of the Hadamard matrices: the largest power of two that divides a width."""
    return width & -width


def _rotate(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiplies each part of the rows by a Hadamard matrix, with the sums of the kernels."""
    stride, shape = 1, x.shape
    while stride < _rotation_size(shape[-1]):
        pairs = x.reshape(*shape[:-1], -1, 2, stride)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([first + second, first - second], axis=-2).reshape(shape)
        stride *= 2
    return x


def _sum(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sums rows in sixteen partial sums, and these as a tree; returns `[..., 1]`."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LANES)]
    parts = np.pad(x, padding).reshape(*x.shape[:-1], -1, LANES)
    total = np.zeros((*x.shape[:-1], LANES), np.float32)
    for part in range(parts.shape[-2]):
        total = total + parts[..., part, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total
