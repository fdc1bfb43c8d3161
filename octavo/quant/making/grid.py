"""Quantization grids (a scale and a zero or minimum per group of inputs) and the search for those
of least error.

Sources: AutoGPTQ's `mse` (shrunken ranges), ggml's k-quants (lines fitted to codes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.quant.packed import Levels

Floats32 = NDArray[np.float32]

GridKind = Literal["middle", "zero", "min"]
"""Offset of a grid: a fixed zero at the middle code, an integer zero per group, or a minimum per
group."""

SHRINKS = tuple(1.0 - 0.025 * step for step in range(17))
"""Candidate shares of a group's range: clipping the ends makes the inner steps finer."""

ROUNDS = 3
"""Least-squares refits per candidate range, including the range itself."""

CHUNK_VALUES = 1 << 19
"""Values searched at a time, so that temporaries take a few megabytes."""


@dataclass(frozen=True, slots=True)
class GridSpec:
    """The kind of grid that a matrix is rounded to."""

    bits: int
    group: int
    """Inputs per group; 0: entire rows."""
    kind: GridKind
    least_zero: int = 0
    """Smallest zero that the format can represent."""

    @property
    def top(self) -> int:
        """Largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << self.bits - 1

    def get_group_size(self, num_inputs: int) -> int:
        return self.group or num_inputs


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Values of each group's codes 0 to `top`: (code - zero_point - zero) * scale + min, as in
    `PackedWeight`.
    """

    group: int
    top: int
    scales: Levels
    """Scales as stored, `[out, groups]`."""
    zero_point: int = 0
    zeros: NDArray[np.int16] | None = None
    """Zero of each group, `[out, groups]`; None: `zero_point` for all."""
    mins: Levels | None = None

    def lines(self) -> tuple[Floats32, Floats32]:
        """Returns the step and the value of code 0 of each group, `[out, groups]` each."""
        scales = self.scales.expand()
        if self.mins is not None:
            return scales, self.mins.expand() - scales * np.float32(self.zero_point)
        zeros = self.zero_point if self.zeros is None else self.zeros
        return scales, -scales * np.asarray(zeros, np.float32)

    def divided(self, rows: NDArray[np.intp], factors: Floats32) -> Grid:
        """Returns the grid with some rows divided by factors; codes stay the same."""
        return replace(
            self,
            scales=_divide(self.scales, rows, factors),
            mins=None if self.mins is None else _divide(self.mins, rows, factors),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RoundedMatrix:
    """A matrix `[out, in]` as codes on a grid."""

    codes: NDArray[np.uint8]
    """`[out, in]`, in the order of `permutation`"""
    grid: Grid
    permutation: NDArray[np.int32] | None = None
    """Original input of each column of `codes`; None: unpermuted."""

    def values(self) -> Floats32:
        """Returns the dequantized values, `[out, in]` in original input order."""
        steps, lows = (
            np.repeat(line, self.grid.group, axis=1)[:, : self.codes.shape[1]]
            for line in self.grid.lines()
        )
        dequantized: Floats32 = self.codes * steps + lows
        if self.permutation is None:
            return dequantized
        own = np.empty_like(dequantized)
        own[:, self.permutation] = dequantized
        return own

    def divided(self, rows: NDArray[np.intp], factors: Floats32) -> RoundedMatrix:
        return replace(self, grid=self.grid.divided(rows, factors))


def fit_grid(
    weight: Floats32, importance: Floats32 | None, spec: GridSpec, *, searches: bool = True
) -> Grid:
    """Returns the grid of least squared error for `weight [out, in]`, weighted by `importance
    [in]`.

    The last group may be shorter. Without a search, the grid covers each group's full range.
    """
    outputs, inputs = weight.shape
    group = spec.get_group_size(inputs)
    num_groups = -(-inputs // group)
    scales = np.empty((outputs, num_groups), np.float16)
    seconds = np.empty((outputs, num_groups), np.float32)
    shares = padded(_ones_if_none(importance, inputs), group).reshape(num_groups, group)
    for rows in row_chunks(weight):
        values = padded(weight[rows], group).reshape(-1, num_groups, group)
        scales[rows], seconds[rows] = best_lines(values, shares, spec, searches=searches)
    if spec.kind == "min":
        return Grid(group, spec.top, Levels(scales), mins=Levels(seconds.astype(np.float16)))
    if spec.kind == "middle":
        return Grid(group, spec.top, Levels(scales), zero_point=spec.middle)
    return Grid(group, spec.top, Levels(scales), zeros=seconds.astype(np.int16))


def round_to(grid: Grid, weight: Floats32) -> NDArray[np.uint8]:
    """Returns the nearest codes, `[out, in] u8`."""
    steps, lows = grid.lines()
    codes = np.empty(weight.shape, np.uint8)
    for rows in row_chunks(weight):
        spread = [
            np.repeat(each[rows], grid.group, axis=1)[:, : weight.shape[1]]
            for each in (inverse(steps), lows)
        ]
        codes[rows] = np.clip(np.rint((weight[rows] - spread[1]) * spread[0]), 0, grid.top)
    return codes


def best_lines(
    values: Floats32, shares: Floats32, spec: GridSpec, *, searches: bool = True
) -> tuple[Floats32, Floats32]:
    """Returns the fp16-representable scale and the zero or minimum of each group of `values [n,
    groups, group]`.

    Picks the best of several ranges and of the lines fitted to their codes.
    """
    groups = _Groups(values, shares, spec)
    shape = values.shape[:-1]
    best = (np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32))
    least = np.full(shape, np.inf, np.float32)
    for scale, second in groups.candidates(SHRINKS if searches else SHRINKS[:1]):
        for _ in range(ROUNDS if searches else 1):
            scale, second = groups.round_to_stored(scale, second)
            centred, error = groups.errors(scale, second)
            better = error < least
            for kept, found in zip((*best, least), (scale, second, error), strict=True):
                np.copyto(kept, found, where=better)
            if searches:
                scale, second = groups.refitted(centred, scale, second)
    return best


class _Groups:
    """Values `[n, groups, group]` and the inputs' importance `[groups, group]`."""

    def __init__(self, values: Floats32, shares: Floats32, spec: GridSpec) -> None:
        self._values = values
        self._shares = shares
        self._spec = spec

    def candidates(self, shrinks: tuple[float, ...]) -> Iterator[tuple[Floats32, Floats32]]:
        """Yields scales and zeros or minima of full and shrunken ranges."""
        low, high = self._values.min(axis=-1), self._values.max(axis=-1)
        top, zero = np.float32(self._spec.top), np.float32(0)
        for shrink in map(np.float32, shrinks):
            if self._spec.kind == "min":
                middle, half = (low + high) / 2, (high - low) / 2 * shrink
                yield 2 * half / top, middle - half
            elif self._spec.kind == "middle":
                reach = np.maximum(-low, high) * shrink
                yield 2 * reach / top, np.full_like(low, self._spec.middle)
            else:
                start = np.minimum(low, zero) * shrink
                scale = (np.maximum(high, zero) * shrink - start) / top
                yield scale, -start * inverse(scale)

    def round_to_stored(self, scale: Floats32, second: Floats32) -> tuple[Floats32, Floats32]:
        """Rounds scale and zero or minimum to what formats store."""
        if self._spec.kind == "min":
            return _fp16(scale), _fp16(second)
        return _fp16(scale), np.clip(np.rint(second), self._spec.least_zero, self._spec.top)

    def errors(self, scale: Floats32, second: Floats32) -> tuple[Floats32, Floats32]:
        """Returns codes (relative to the zero, if there is one) and each group's weighted squared
        error.
        """
        has_min = self._spec.kind == "min"
        start = second if has_min else -second * scale
        codes = (self._values - start[..., None]) * inverse(scale)[..., None]
        np.clip(np.rint(codes, out=codes), 0, self._spec.top, out=codes)
        if not has_min:
            codes -= second[..., None]
        missed = codes * scale[..., None] - self._values
        if has_min:
            missed += second[..., None]
        return codes, np.einsum("ngi,ngi,gi->ng", missed, missed, self._shares)

    def refitted(
        self, centred: Floats32, scale: Floats32, second: Floats32
    ) -> tuple[Floats32, Floats32]:
        """Returns the least-squares scale and minimum for given codes."""
        shares, values = self._shares, self._values
        has_min = self._spec.kind == "min"
        code = value = np.zeros_like(scale)
        if has_min:
            shares = shares / np.maximum(shares.sum(axis=-1, keepdims=True), np.float32(1e-30))
            code, value = (np.einsum("ngi,gi->ng", each, shares) for each in (centred, values))
            centred = centred - code[..., None]
        square = np.einsum("ngi,ngi,gi->ng", centred, centred, shares)
        product = np.einsum("ngi,ngi,gi->ng", centred, values, shares)
        usable = (square > 0) & (product > 0)
        slope: Floats32 = np.where(usable, product / np.where(usable, square, 1), scale)
        start: Floats32 = value - slope * code
        return slope, start if has_min else second


def _fp16(numbers: Floats32) -> Floats32:
    """Rounds to fp16 precision."""
    return numbers.astype(np.float16).astype(np.float32)


def inverse(scale: Floats32) -> Floats32:
    """Returns 1 / scale, and 0 for 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def padded(rows: Floats32, group: int) -> Floats32:
    """Pads rows to complete groups with their last value."""
    missing = -rows.shape[-1] % group
    pad = [(0, 0)] * (rows.ndim - 1) + [(0, missing)]
    return np.pad(rows, pad, mode="edge") if missing else rows


def row_chunks(weight: Floats32) -> Iterator[slice]:
    rows = max(1, CHUNK_VALUES // max(1, weight.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(weight), rows))


def _ones_if_none(importance: Floats32 | None, inputs: int) -> Floats32:
    if importance is None:
        return np.ones(inputs, np.float32)
    # Inputs that no calibration token used still count a little, or their grid would be any.
    floor = max(float(importance.mean()) * 1e-4, 1e-30)
    return np.maximum(importance, floor).astype(np.float32)


def _divide(levels: Levels, rows: NDArray[np.intp], factors: Floats32) -> Levels:
    """Divides some rows' values; the super-scales if there are two levels."""
    stored = levels.values if levels.super_scale is None else levels.super_scale
    changed = stored.copy()
    changed[rows] = (stored[rows].astype(np.float32) / factors[:, None]).astype(stored.dtype)
    if levels.super_scale is None:
        return Levels(changed)
    return Levels(levels.values, changed)
