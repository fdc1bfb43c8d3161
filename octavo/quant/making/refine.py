"""Codes and scales of a rounded matrix made better in turns, each for what all others are.

GPTQ decides each code once, before it knows those behind it. Here each group's scale and each of
its codes becomes the best one while the others stay, several times over, so that the error of the
products only falls. Source of the idea: Behdin et al. 2023, "QuantEase", coordinate descent from
GPTQ's solution on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats32 = NDArray[np.float32]

SWEEPS = 6
"""Times that every group is looked at again; later ones change less than a code in a thousand."""


@dataclass(slots=True)
class GroupedColumns:
    """Codes `[in, out]` on the lines of their groups: code * step + low."""

    codes: NDArray[np.uint8]
    steps: Floats32
    """Step of each group, `[groups, out]`."""
    lows: Floats32
    """Number of code 0 of each group, `[groups, out]`."""
    group: int
    top: int
    zeros: Floats32 | None = None
    """Code that stands for 0 in each group, where steps may change: `[groups, out]`."""

    def values(self) -> Floats32:
        """Returns the numbers that the codes stand for, `[in, out]`."""
        own = np.arange(len(self.codes)) // self.group
        found: Floats32 = self.codes * self.steps[own] + self.lows[own]
        return found


def refine(columns: Floats32, made: GroupedColumns, hessian: Floats32) -> None:
    """Changes codes for less error of `columns [in, out]` under `hessian [in, in]`, and steps to
    what fp16 has where zeros are known.
    """
    # The slope of the error at each number: H (Q - W).
    slopes = hessian @ (made.values() - columns)
    for _ in range(SWEEPS):
        changed = 0
        for index, start in enumerate(range(0, len(columns), made.group)):
            own = slice(start, min(start + made.group, len(columns)))
            moves, count = _refined_group(made, index, own, hessian[own, own], slopes[own])
            changed += count
            slopes += hessian[:, own] @ moves
        if changed * 10_000 < made.codes.size:
            break


def _refined_group(
    made: GroupedColumns,
    index: int,
    own: slice,
    hessian: Floats32,
    slopes: Floats32,
) -> tuple[Floats32, int]:
    """Refines one group; returns how its numbers moved, `[group, out]`, and how many codes did."""
    slopes = slopes.copy()
    codes = made.codes[own].astype(np.float32)
    moves = np.zeros_like(codes)
    if made.zeros is not None:
        moves += _refitted(made, index, codes - made.zeros[index], hessian, slopes)
        slopes += hessian @ moves
    step = made.steps[index]
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    changed = 0
    for at in range(len(codes)):
        if hessian[at, at] <= 0:
            continue
        wish = codes[at] - slopes[at] / hessian[at, at] * inverse
        better = np.clip(np.rint(wish), 0, made.top)
        move = (better - codes[at]) * step
        changed += int(np.count_nonzero(move))
        codes[at] = better
        moves[at] += move
        slopes += np.outer(hessian[:, at], move)
    made.codes[own] = codes
    return moves, changed


def _refitted(
    made: GroupedColumns, index: int, centred: Floats32, hessian: Floats32, slopes: Floats32
) -> Floats32:
    """Gives a group the steps of least error; returns how its numbers moved. `centred [group, out]`
    are its codes less the zero.
    """
    assert made.zeros is not None
    step = made.steps[index]
    square = np.einsum("io,io->o", centred, hessian @ centred)
    slope = np.einsum("io,io->o", centred, slopes)
    wish = step - np.divide(slope, square, out=np.zeros_like(slope), where=square > 0)
    better = wish.astype(np.float16).astype(np.float32)
    moved = better - step
    usable = (wish > 0) & np.isfinite(better) & (slope * moved + square * moved**2 / 2 < 0)
    moved = np.where(usable, moved, np.float32(0))
    made.steps[index] = step + moved
    made.lows[index] = -made.zeros[index] * made.steps[index]
    return np.asarray(centred * moved, np.float32)
