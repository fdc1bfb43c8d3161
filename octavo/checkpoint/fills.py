"""Computes weights that no checkpoint contains, by the rules of `program.Fill`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.program.program import (
    Fill,
    Growth,
    Harmonics,
    Impulse,
    PowerGrowth,
    Selection,
    Sinusoids,
)

Shape = tuple[int, ...]
Floats = NDArray[np.float32]


def fill_weight(shape: Shape, fill: Fill) -> Floats:
    """Returns a computed weight of a shape."""
    rule = RULES.get(type(fill))
    if rule is None:
        return np.full(shape, np.asarray(fill, np.float32), np.float32)
    made: Floats = rule(shape, fill)
    return made


def _growth(shape: Shape, fill: Growth) -> Floats:
    steps = (np.arange(shape[0]) + fill.shift) // fill.floor
    return (1 + fill.slope * np.log1p(steps))[:, None].astype(np.float32)


def _power_growth(shape: Shape, fill: PowerGrowth) -> Floats:
    grown = (np.arange(shape[0]) + fill.shift) / fill.start
    return np.exp(fill.exponent * np.log1p(grown))[:, None].astype(np.float32)


def _impulse(shape: Shape, fill: Impulse) -> Floats:
    table = np.full(shape, fill.off, np.float32)
    table[fill.row] = 0
    return table


def _selection(shape: Shape, fill: Selection) -> Floats:
    chosen: NDArray[np.bool_] = np.arange(shape[1]) == np.array(fill.columns)[:, None]
    return chosen.astype(np.float32)


def _sinusoids(shape: Shape, fill: Sinusoids) -> Floats:
    num_rows, width = shape
    dtype: Any = np.float32 if fill.in_single else np.float64
    step = np.full(1, -math.log(10000) / fill.denominator, dtype)
    frequencies = np.exp(np.arange(width // 2).astype(dtype) * step)
    angles = np.arange(num_rows).astype(dtype)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _harmonics(shape: Shape, fill: Harmonics) -> Floats:
    num_rows, period = shape
    orders = np.arange(fill.num_pairs)[:, None]
    angles = 2 * np.pi / period * orders * np.arange(period)
    is_single = (orders == 0) | (2 * orders == period)
    factors = np.where(2 * orders > period, 0, np.where(is_single, 1, 2)) / period
    one = np.concatenate([factors * np.cos(angles), -factors * np.sin(angles)])
    return np.tile(one, (num_rows // len(one), 1)).astype(np.float32)


RULES: dict[type[Any], Callable[[Shape, Any], Floats]] = {
    Growth: _growth,
    Harmonics: _harmonics,
    Impulse: _impulse,
    PowerGrowth: _power_growth,
    Selection: _selection,
    Sinusoids: _sinusoids,
}
