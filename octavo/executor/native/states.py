"""Layout of recurrent states and scan parameters in the native kernels.

Columns are grouped into blocks of 16 lanes: 16 columns of one head, or 16 heads of one column each.
Neighbouring blocks form a part, the unit that one thread computes at a time (csrc/plan/mixers.h).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.program.program import CacheGroup

LANES = 16
"""Columns that kernels process together (csrc/simd/simd.h)."""

PART_BYTES = 16 << 10
"""Approximate bytes of a part's state: it stays in the L1 cache while all rows are processed."""


@dataclass(frozen=True, slots=True)
class StateBlocks:
    num_heads: int
    head_width: int
    state_size: int

    @staticmethod
    def of(group: CacheGroup) -> StateBlocks:
        return StateBlocks(group.num_kv_heads, group.k_width, group.v_width)

    @property
    def num_blocks(self) -> int:
        if self.head_width == 1:
            return -(-self.num_heads // LANES)
        return self.num_heads * -(-self.head_width // LANES)

    @property
    def num_parts(self) -> int:
        return -(-self.num_blocks // self._blocks_per_part)

    @property
    def part_floats(self) -> int:
        return self._blocks_per_part * LANES * self.state_size

    @property
    def _blocks_per_part(self) -> int:
        return max(1, PART_BYTES // (4 * LANES * self.state_size))

    def by_lanes(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Lays out per-head values by lanes: `[H]` becomes `[blocks, 16]`, `[H, n]` becomes
        `[blocks, n, 16]`.
        """
        rows = values.reshape(self.num_heads, -1)
        if self.head_width == 1:
            padded = np.zeros((self.num_blocks * LANES, rows.shape[1]), np.float32)
            padded[: self.num_heads] = rows
            lanes = padded.reshape(self.num_blocks, LANES, -1).transpose(0, 2, 1)
        else:
            copies = np.repeat(rows, self.num_blocks // self.num_heads, axis=0)
            lanes = np.repeat(copies[:, :, None], LANES, axis=2)
        return np.ascontiguousarray(lanes if values.ndim > 1 else lanes[:, 0], np.float32)
