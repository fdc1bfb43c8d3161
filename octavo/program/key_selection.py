"""Which blocks of keys a sparse row reads: what an attention knows of the choice made in each step.

The pass `select_keys` sets it, and backends choose by it; no model's file names it. Source:
InfiniGen (Lee et al. 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_BLOCKS = 4
"""Fewest blocks that are read."""
LAST_BLOCKS = 2
"""Last blocks, which are always read, as the first one is."""


@dataclass(frozen=True, slots=True)
class KeySelection:
    """Choice of the blocks of 16 keys that a sparse row reads: those to which most of its attention
    would go by a part of the columns of queries and keys, summed over the heads.

    The first block and the last `LAST_BLOCKS` are always read, and `LEAST_BLOCKS` at least. The
    attention's splits are counted over the keys that are read.
    """

    group: str
    """Cache group of the same columns of the keys, under the same places."""
    layer: int
    budget: float
    """Share of the blocks that are read."""

    def num_blocks(self, num_blocks: int) -> int:
        """Returns the number of blocks that are read of those that a row sees."""
        return min(num_blocks, max(LEAST_BLOCKS, math.ceil(self.budget * num_blocks)))
