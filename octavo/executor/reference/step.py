"""One run of a Program on the reference backend: inputs of its ops and computed Values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import StepBatch
from octavo.executor.reference.adapters import Shrink, updated
from octavo.program.low_rank import Site, Updates
from octavo.program.program import Program, Value, Weight

Floats = NDArray[np.float64]
Made = tuple[NDArray, ...]

Exchange = Callable[[NDArray], Sequence[NDArray]]
"""Sends this rank's array to the others and returns all ranks' arrays in rank order."""


def as_is(numbers: Floats) -> Floats:
    return numbers


def alone(x: NDArray) -> Sequence[NDArray]:
    """The exchange of a single rank."""
    return [x]


def matvecs(matrix: Floats, x: Floats) -> Floats:
    """Multiplies `matrix [out, in]` by each row of `x [T, in]`: `[T, out]`."""
    if not len(x):
        return np.empty((0, len(matrix)))
    # One matrix product would be faster, but BLAS's bits depend on T.
    return np.stack([matrix @ row for row in x])


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """KV arrays of one cache group."""

    k: NDArray
    """`[L, blocks, 16, K, k_width]`"""
    v: NDArray
    """`[L, blocks, 16, K, v_width]`"""
    round_keys: Callable[[Floats], Floats] = as_is
    """Rounds rows `[T, K, width]` to cache precision, before the cast to the arrays' dtype."""
    round_values: Callable[[Floats], Floats] = as_is


@dataclass(slots=True)
class ReferenceStep:
    """One run: inputs of ops and computed Values."""

    program: Program
    weights: dict[Weight, Floats]
    batch: StepBatch
    kv: list[GroupArrays]
    values: dict[str, NDArray] = field(default_factory=dict)
    multiply: Callable[[Floats, Floats], Floats] = matvecs
    """Multiplies a matrix `[out, in]` by rows `[T, in]`, for linears."""
    exchange: Exchange = alone
    adapters: Mapping[int, Updates] = field(default_factory=dict)
    """Adapters by slot."""
    live: NDArray[np.bool_] = field(init=False)
    """Rows that are not padding, `[T]`."""

    def __post_init__(self) -> None:
        batch = self.batch
        has_groups = len(batch.slots) > 0
        self.live = (
            np.any(batch.slots >= 0, axis=0)
            if has_groups
            else np.ones(len(batch.token_ids), np.bool_)
        )
        for name, value in self.program.inputs.items():
            self.values[value.name] = (
                batch.token_ids if name == "token_ids" else np.asarray(batch.hidden, np.float64)
            )

    def get(self, value: Value) -> NDArray:
        return self.values[value.name]

    def positions(self, axis: int = 0) -> NDArray[np.int64]:
        """Returns the positions on an axis, `[T]`; 0 for padding."""
        return np.where(self.live, self.batch.positions[axis], 0).astype(np.int64)

    def updated(self, y: Floats, site: Site, axis: str, shrink: Shrink) -> Floats:
        """Applies the rows' adapters at a site; see `adapters.updated`."""
        slots = self.batch.adapter_rows
        if slots is None or not site[0]:
            return y
        if axis == "samples":
            slots = slots[self.batch.sample_rows]
        elif axis == "requests":
            slots = slots[np.maximum(self.batch.query_starts[1:] - 1, 0)]
        return updated(y, site, slots, self.adapters, shrink)


def sparse_rows(num_rows: int, step: ReferenceStep) -> NDArray[np.bool_]:
    """Returns which token rows are sparse, `[num_rows, 1]`."""
    batch, is_sparse = step.batch, np.zeros((num_rows, 1), np.bool_)
    if batch.sparse_from is not None:
        begins = batch.sparse_from.repeat(np.diff(batch.query_starts))
        is_sparse[: len(begins), 0] = batch.key_indices[: len(begins)] >= begins
    return is_sparse
