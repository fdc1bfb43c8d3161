"""Coordinate descent on the codes and scales of a rounded matrix.

GPTQ chooses each code once, before the later ones. Here each group's scale and each code are
optimized repeatedly while the others are fixed, so the output error never increases. Source: Behdin
et al. 2023, "QuantEase", started from GPTQ's solution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats32 = NDArray[np.float32]

SWEEPS = 6
"""Number of passes over all groups; more would change less than 0.1% of the codes."""


@dataclass(slots=True)
class GroupedColumns:
    """Codes `[in, out]` on their groups' grid lines: code * step + low."""

    codes: NDArray[np.uint8]
    steps: Floats32
    """`[groups, out]`"""
    lows: Floats32
    """Value of code 0, `[groups, out]`."""
    group: int
    top: int
    zeros: Floats32 | None = None
    """Code of value 0 in each group, if steps may change: `[groups, out]`."""

    def values(self) -> Floats32:
        """Returns the dequantized values, `[in, out]`."""
        own = np.arange(len(self.codes)) // self.group
        dequantized: Floats32 = self.codes * self.steps[own] + self.lows[own]
        return dequantized


def refine(columns: Floats32, rounded: GroupedColumns, hessian: Floats32) -> None:
    """Updates codes in place to reduce the error of `columns [in, out]` under `hessian [in, in]`;
    also updates steps (in fp16 precision) if zeros are known.
    """
    # The gradient of the error for each value: H (Q - W).
    slopes = hessian @ (rounded.values() - columns)
    for _ in range(SWEEPS):
        changed = 0
        for index, start in enumerate(range(0, len(columns), rounded.group)):
            own = slice(start, min(start + rounded.group, len(columns)))
            moves, count = _refined_group(rounded, index, own, hessian[own, own], slopes[own])
            changed += count
            slopes += hessian[:, own] @ moves
        if changed * 10_000 < rounded.codes.size:
            break


def _refined_group(
    rounded: GroupedColumns,
    index: int,
    own: slice,
    hessian: Floats32,
    slopes: Floats32,
) -> tuple[Floats32, int]:
    """Refines one group; returns the change of its values, `[group, out]`, and the number of
    changed codes.
    """
    slopes = slopes.copy()
    codes = rounded.codes[own].astype(np.float32)
    moves = np.zeros_like(codes)
    if rounded.zeros is not None:
        moves += _refit(rounded, index, codes - rounded.zeros[index], hessian, slopes)
        slopes += hessian @ moves
    step = rounded.steps[index]
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    changed = 0
    for index_in_group in range(len(codes)):
        if hessian[index_in_group, index_in_group] <= 0:
            continue
        wish = (
            codes[index_in_group]
            - slopes[index_in_group] / hessian[index_in_group, index_in_group] * inverse
        )
        better = np.clip(np.rint(wish), 0, rounded.top)
        move = (better - codes[index_in_group]) * step
        changed += int(np.count_nonzero(move))
        codes[index_in_group] = better
        moves[index_in_group] += move
        slopes += np.outer(hessian[:, index_in_group], move)
    rounded.codes[own] = codes
    return moves, changed


def _refit(
    rounded: GroupedColumns, index: int, centred: Floats32, hessian: Floats32, slopes: Floats32
) -> Floats32:
    """Sets a group's steps to the values with the least error; returns the change of its values.

    `centred [group, out]` are its codes relative to the zero.
    """
    assert rounded.zeros is not None
    step = rounded.steps[index]
    square = np.einsum("io,io->o", centred, hessian @ centred)
    slope = np.einsum("io,io->o", centred, slopes)
    wish = step - np.divide(slope, square, out=np.zeros_like(slope), where=square > 0)
    better = wish.astype(np.float16).astype(np.float32)
    moved = better - step
    usable = (wish > 0) & np.isfinite(better) & (slope * moved + square * moved**2 / 2 < 0)
    moved = np.where(usable, moved, np.float32(0))
    rounded.steps[index] = step + moved
    rounded.lows[index] = -rounded.zeros[index] * rounded.steps[index]
    return np.asarray(centred * moved, np.float32)
