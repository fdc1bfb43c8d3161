"""Maps block ids to block indices in the backend's KV memory: paged, or contiguous per request.

The control plane uses block ids in both layouts. In the paged layout, the index is the block id. In
the virtual layout, each running request (row) has a virtual address range of maximum context
length, which contains its blocks in token order, and a block id only counts against the memory
limit. Memory is used once a block is written; it is released when the request finishes or the id is
reused. Source: vAttention (Prabhu et al. 2024).
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_bytes
from octavo.executor.kv import BLOCK_SIZE, OnDemandKvCache

NOWHERE = -1
"""Index of a hole, and of a block id without memory."""


@dataclass(frozen=True, slots=True)
class RangeShape:
    """A request's address range in one cache group. Every piece consists of full pages, so that
    requests do not share any.
    """

    num_ids: int
    """Maximum number of blocks of the group that have memory at the same time."""
    num_blocks: int
    """Number of blocks in one range."""
    pieces: tuple[int, ...]
    """Size in bytes of each contiguous piece of a block in one layer."""
    num_layers: int

    @staticmethod
    def build(
        num_ids: int, context_blocks: int, pieces: tuple[int, ...], num_layers: int
    ) -> RangeShape:
        """Returns the shape of ranges that hold at least `context_blocks` blocks."""
        # the smallest number of blocks for which every piece has full pages
        step = math.lcm(*(mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, piece) for piece in pieces))
        return RangeShape(num_ids, -(-context_blocks // step) * step, pieces, num_layers)

    @property
    def most_lost_bytes(self) -> int:
        """Upper bound on the bytes lost per request if the block size is not a multiple of the page
        size.
        """
        return self.num_layers * sum(
            mmap.PAGESIZE - math.gcd(mmap.PAGESIZE, piece) for piece in self.pieces
        )

    def get_num_bytes(self, first: int, end: int) -> int:
        """Returns the bytes of the range's blocks from `first` up to `end`, in full pages."""
        page = mmap.PAGESIZE
        return self.num_layers * sum(
            (-(-end * piece // page) - first * piece // page) * page for piece in self.pieces
        )


def check_addressable(ranges: Sequence[RangeShape], *, num_rows: int) -> None:
    """Raises ConfigError if 32-bit slots cannot address all tokens of the ranges, or if the system
    cannot release memory.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"kv_layout: virtual requires Linux, got {sys.platform}", hint="set kv_layout to paged"
        )
    num_tokens = num_rows * max(shape.num_blocks for shape in ranges) * BLOCK_SIZE
    if num_tokens >= 1 << 31:
        what = (
            f"kv_layout: virtual requires addresses for {num_tokens:,} tokens (max_num_seqs times"
            " max_model_len)"
        )
        raise ConfigError(
            f"{what}, expected fewer than {1 << 31:,}",
            hint="lower max_num_seqs or max_model_len",
        )


def describe_ranges(ranges: Sequence[RangeShape], *, num_rows: int) -> str:
    """Returns the startup message."""
    addresses = sum(
        num_rows * shape.num_blocks * shape.num_layers * sum(shape.pieces) for shape in ranges
    )
    lost = format_bytes(sum(shape.most_lost_bytes for shape in ranges))
    what = f"KV ranges: {format_bytes(addresses)} of addresses for {num_rows:,} requests"
    return f"{what}; each request may use up to {lost} more than its blocks"


class VirtualBlockMap:
    """Map from block ids to block indices in the backend's `KvCache`, in the virtual layout. The
    range of row r in group g begins at index r * ranges[g].num_blocks.
    """

    def __init__(self, kv: OnDemandKvCache, ranges: Sequence[RangeShape], *, num_rows: int) -> None:
        self.num_bytes = 0
        """Bytes of memory that requests currently use."""
        self._groups = [
            _GroupBlockMap(kv, group, shape, num_rows) for group, shape in enumerate(ranges)
        ]

    def put(self, group: int, row: int, first: int, block_ids: Sequence[int]) -> NDArray[np.int32]:
        """Assigns the blocks of a row's table from index `first` on to the row's range; returns
        their indices. Holes stay holes.
        """
        indices = self._groups[group].put(row, first, np.array(block_ids, np.int32))
        self._count()
        return indices

    def find(self, group: int, block_id: int) -> int:
        return int(self._groups[group].indices[block_id])

    def shorten(self, group: int, row: int, num_blocks: int) -> None:
        """Releases the memory after the first `num_blocks` blocks of a row's table."""
        self._groups[group].shorten(row, num_blocks)
        self._count()

    def clear(self, row: int) -> None:
        """Releases all memory of a row that is freed."""
        for group in self._groups:
            group.clear(row)
        self._count()

    def _count(self) -> None:
        self.num_bytes = sum(group.num_bytes for group in self._groups)


class _GroupBlockMap:
    """Block indices of one cache group. A block id has at most one index, so the number of blocks
    with memory is at most the number of ids.
    """

    def __init__(self, kv: OnDemandKvCache, group: int, shape: RangeShape, num_rows: int) -> None:
        self.indices = np.full(shape.num_ids, NOWHERE, np.int32)
        """Index of each block id."""
        self.num_bytes = 0
        self._ids = np.full(num_rows * shape.num_blocks, NOWHERE, np.int32)
        """Block id at each index."""
        self._firsts = [0] * num_rows
        """First block of each row's range that may have memory."""
        self._ends = [0] * num_rows
        """End of the blocks of each row's range that may have memory."""
        self._kv = kv
        self._group = group
        self._shape = shape

    def put(self, row: int, first: int, block_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        new_indices = (
            np.arange(first, first + len(block_ids), dtype=np.int32) + row * self._shape.num_blocks
        )
        new_indices[block_ids < 0] = NOWHERE
        live = block_ids[block_ids >= 0]
        for index in self.indices[live]:
            if index != NOWHERE:
                self._release(int(index))
        self.indices[live] = new_indices[block_ids >= 0]
        self._ids[new_indices[block_ids >= 0]] = live
        self._set_range(row, self._firsts[row], max(self._ends[row], first + len(block_ids)))
        return new_indices

    def shorten(self, row: int, num_blocks: int) -> None:
        """Releases the memory of a row's blocks after the first `num_blocks`."""
        if self._ends[row] <= num_blocks:
            return
        # Up to the end of the range, a page boundary: a page that reached further would stay.
        first, end = row * self._shape.num_blocks, (row + 1) * self._shape.num_blocks
        ids = self._ids[first + num_blocks : end]
        self.indices[ids[ids >= 0]] = NOWHERE
        ids[:] = NOWHERE
        self._kv.give_back(self._group, first + num_blocks, len(ids))
        self._set_range(row, min(self._firsts[row], num_blocks), num_blocks)

    def clear(self, row: int) -> None:
        self.shorten(row, 0)

    def _release(self, index: int) -> None:
        """Releases the memory of a block whose id is reused. The block is outside of the attention
        window, so neither it nor earlier blocks of its range are read any more.
        """
        row, block = divmod(index, self._shape.num_blocks)
        self._ids[index] = NOWHERE
        if block >= self._firsts[row]:
            self._kv.give_back(self._group, row * self._shape.num_blocks, block + 1)
            self._set_range(row, block + 1, self._ends[row])

    def _set_range(self, row: int, first: int, end: int) -> None:
        """Sets which blocks of a row's range may have memory, and updates the byte count."""
        self.num_bytes -= self._shape.get_num_bytes(self._firsts[row], self._ends[row])
        self._firsts[row] = first
        self._ends[row] = end
        self.num_bytes += self._shape.get_num_bytes(first, end)
