"""Constant parts of disentangled attention (DeBERTa): distance buckets and projected position
tables.

He et al. 2021, section 3.1; logarithmic buckets as in its reference code, which computes them in
fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.program.family_ops import PositionScores
from octavo.program.ops import PositionBuckets
from octavo.program.program import Weight

Floats = NDArray[np.float64]


def position_buckets(distance: NDArray[np.int64], bias: PositionBuckets) -> NDArray[np.int64]:
    """Returns the bucket of each distance, query index - key index; 0 maps to the middle one."""
    half = bias.num_buckets // 2
    signed = distance if bias.max_distance is None else _logarithmic(distance, half, bias)
    buckets: NDArray[np.int64] = np.clip(signed + half, 0, bias.num_buckets - 1)
    return buckets


def _logarithmic(
    distance: NDArray[np.int64], half: int, bias: PositionBuckets
) -> NDArray[np.int64]:
    assert bias.max_distance is not None
    exact = half // 2
    away = np.where(np.abs(distance) < exact, exact - 1, np.abs(distance))
    # Every operation rounds to fp32 as in the reference code; otherwise a distance could fall into
    # the next bucket.
    octaves = np.log((away / exact).astype(np.float32))
    whole = np.log(np.float32((bias.max_distance - 1) / exact))
    far = np.ceil(octaves / whole * np.float32(exact - 1)) + np.float32(exact)
    signed = far.astype(np.int64) * np.sign(distance)
    buckets: NDArray[np.int64] = np.where(away <= exact, distance, signed)
    return buckets


def position_table(op: PositionScores, floats: Callable[[Weight], NDArray[Any]]) -> Floats:
    """Returns the projected position table of each head, `[H, R, D]`."""
    rows, weight, bias = (
        np.asarray(floats(weight_or_bias), np.float64)
        for weight_or_bias in (op.table, op.weight, op.bias)
    )
    if op.norm is not None:
        centered = rows - rows.mean(axis=1, keepdims=True)
        variance = np.square(centered).mean(axis=1, keepdims=True)
        rows = centered / np.sqrt(variance + op.norm.eps) * floats(op.norm.weight)
        if op.norm.bias is not None:
            rows = rows + floats(op.norm.bias)
    table = rows @ weight.T + bias
    return np.ascontiguousarray(
        table.reshape(len(rows), op.num_heads, -1).transpose(1, 0, 2), np.float64
    )
