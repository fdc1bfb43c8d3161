"""LoRA adapters of a Program: a low-rank update of one matrix per site.

`checkpoint/peft.py` reads adapters, backends store them. Source: Hu et al. 2021 (LoRA),
Kalajdzievski 2023 (rsLoRA), Liu et al. 2024 (DoRA).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.program.program import Weight

Site: TypeAlias = tuple[str, Weight]
"""Module name, and the Program's matrix or table for the module (or for some of its rows)."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Update of a matrix W: y = gain * (W x + B (scales * A x)) + bias.

    For an embedding table: y = gain * (W[id] + B (scales * A[id])).
    """

    a: NDArray
    """A `[r, in]`, for a table `[V, r]`; float32, bfloat16 or int8, like B. r may be 0."""
    b: NDArray
    """B `[out, r]`"""
    scales: NDArray[np.float64]
    """Scale per rank `[r]`: the adapter's scaling times the scales of int8 A and B."""
    gain: NDArray[np.float32] | None = None
    """Gain per output `[out]` (DoRA); None: 1."""
    bias: NDArray[np.float32] | None = None
    """Bias `[out]`, added to the base model's bias."""

    @property
    def rank(self) -> int:
        return int(self.b.shape[1])

    @property
    def num_bytes(self) -> int:
        arrays = (self.a, self.b, self.scales, self.gain, self.bias)
        return sum(array.nbytes for array in arrays if array is not None)


Updates: TypeAlias = Mapping[Site, LowRank]
