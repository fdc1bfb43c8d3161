"""What an adapter changes about a Program: for each site, a low-rank update of one matrix.

Knows no file and no device: `checkpoint/peft.py` reads adapters, backends keep their bytes. Source:
Hu et al. 2021 (LoRA), Kalajdzievski 2023 (rsLoRA), Liu et al. 2024 (DoRA).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.program.program import Weight

Site: TypeAlias = tuple[str, Weight]
"""A module by its name, and the matrix or table of the Program that stands for it or for a part of
its rows."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """Update of one matrix W: y = gain * (W x + B (scales * A x)) + bias.

    A table's row of token id is updated likewise: y = gain * (W[id] + B (scales * A[id])).
    """

    a: NDArray
    """A `[r, in]`; a table's `[V, r]`. float32, bfloat16 or int8, as B. r may be 0."""
    b: NDArray
    """B `[out, r]`."""
    scales: NDArray[np.float64]
    """Scale of each rank `[r]`: the adapter's, times those of A's and B's int8 codes."""
    gain: NDArray[np.float32] | None = None
    """Gain of each output `[out]` (DoRA); None: 1."""
    bias: NDArray[np.float32] | None = None
    """Numbers added to the outputs `[out]`, beside the base's own biases."""

    @property
    def rank(self) -> int:
        return int(self.b.shape[1])

    @property
    def num_bytes(self) -> int:
        arrays = (self.a, self.b, self.scales, self.gain, self.bias)
        return sum(array.nbytes for array in arrays if array is not None)


Updates: TypeAlias = Mapping[Site, LowRank]
"""The updates of one adapter, by site."""
