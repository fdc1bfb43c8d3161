"""Lists of varying length, one per entry, concatenated in the layout that backends read (CSR)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Csr:
    """Lists of (id, value) of varying length, one per entry, concatenated."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    values: list[NDArray] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, entry: int, ids: NDArray[np.int32], values: NDArray) -> None:
        """Appends the list of `entry`; entries must be added in ascending order."""
        self.ids.append(ids)
        self.values.append(values)
        self.sizes[entry] = len(ids)

    def starts(self, num_entries: int) -> NDArray[np.int32]:
        """Returns the index at which each entry's list begins, `[num_entries + 1]`."""
        sizes = np.zeros(num_entries + 1, np.int32)
        for entry, size in self.sizes.items():
            sizes[entry + 1] = size
        return np.cumsum(sizes, dtype=np.int32)
