"""Selection of the key blocks that a sparse row reads, as an attribute of Attention.

Set by the pass `select_keys`; backends select at each step. Source: InfiniGen (Lee et al. 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_BLOCKS = 4
"""Smallest number of blocks that are read."""
LAST_BLOCKS = 2
"""Number of last blocks that are always read. The first block is always read too."""


@dataclass(frozen=True, slots=True)
class KeySelection:
    """Selects the blocks of 16 keys that get the most attention from a sparse row.

    Attention is estimated from some of the query and key columns and summed over heads. The first
    block and the last `LAST_BLOCKS` are always read, and at least `LEAST_BLOCKS`. Attention splits
    are counted over the selected keys.
    """

    group: str
    """Cache group that stores these key columns, in the same slots as the keys."""
    layer: int
    budget: float
    """Fraction of the blocks that are read."""

    def num_blocks(self, num_blocks: int) -> int:
        """Returns how many of a row's visible blocks are read."""
        return min(num_blocks, max(LEAST_BLOCKS, math.ceil(self.budget * num_blocks)))
