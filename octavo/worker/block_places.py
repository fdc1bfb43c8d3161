"""Where the blocks of a plan lie in the backend's KV memory: at their ids, or one after another in
a range of its request's own.

The control plane deals in block ids alike for both. Paged, an id is a place. Virtual, an id is the
right to one block's memory: a running request (a row) has a range of addresses as long as the
context, its blocks lie there in the order of its tokens, and memory is given to what is written and
taken back when the request leaves, or the id goes to another. Source: vAttention (Prabhu et al.
2024).
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.backends.kv import BLOCK_SIZE, OnDemandKvCache
from octavo.config.sizes import format_bytes
from octavo.errors import ConfigError

NOWHERE = -1


class BlockPlaces(Protocol):
    """Places are indices of blocks in the backend's `KvCache`."""

    num_bytes: int | None
    """Memory given to requests just now; None where it is all given from the start."""

    def put(self, group: int, row: int, first: int, block_ids: Sequence[int]) -> NDArray[np.int32]:
        """The places of blocks that stand in the table of `row` from the index `first` on; holes
        stay holes.
        """
        ...

    def find(self, group: int, block_id: int) -> int:
        """Where a block lies that was put."""
        ...

    def clear(self, row: int) -> None:
        """Its request has left."""
        ...


class PagedPlaces:
    """A block lies where its id says."""

    num_bytes: int | None = None

    def put(self, group: int, row: int, first: int, block_ids: Sequence[int]) -> NDArray[np.int32]:
        return np.array(block_ids, np.int32)

    def find(self, group: int, block_id: int) -> int:
        return block_id

    def clear(self, row: int) -> None:
        """Whoever gets its blocks writes over them."""


@dataclass(frozen=True, slots=True)
class RangeShape:
    """A request's range in one cache group: whole pages of every piece, so that no two requests
    share one.
    """

    num_ids: int
    """Blocks of the group that may have memory at once."""
    num_blocks: int
    pieces: tuple[int, ...]
    """Bytes of what lies together of a block, in one layer."""
    num_layers: int

    @staticmethod
    def of(
        num_ids: int, context_blocks: int, pieces: tuple[int, ...], num_layers: int
    ) -> RangeShape:
        step = math.lcm(*(mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, piece) for piece in pieces))
        return RangeShape(num_ids, -(-context_blocks // step) * step, pieces, num_layers)

    @property
    def most_lost_bytes(self) -> int:
        """At the end of a request, where a block is no multiple of a page."""
        return self.num_layers * sum(
            mmap.PAGESIZE - math.gcd(mmap.PAGESIZE, piece) for piece in self.pieces
        )

    def bytes_of(self, first: int, end: int) -> int:
        """Memory of the range's blocks from `first` up to `end`, in whole pages."""
        page = mmap.PAGESIZE
        return self.num_layers * sum(
            (-(-end * piece // page) - first * piece // page) * page for piece in self.pieces
        )


def check_addressable(ranges: Sequence[RangeShape], *, num_rows: int) -> None:
    """ConfigError where slots (32 bits) cannot number the ranges' tokens, or the system takes no
    memory back.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"kv_layout: virtual is for Linux, got {sys.platform}", hint="leave kv_layout at paged"
        )
    num_tokens = num_rows * max(shape.num_blocks for shape in ranges) * BLOCK_SIZE
    if num_tokens >= 1 << 31:
        what = (
            f"kv_layout: virtual takes addresses for {num_tokens:,} tokens (max_num_seqs times"
            " max_model_len)"
        )
        raise ConfigError(
            f"{what}, allowed are fewer than {1 << 31:,}",
            hint="lower max_num_seqs or max_model_len",
        )


def describe_ranges(ranges: Sequence[RangeShape], *, num_rows: int) -> str:
    """The line printed at the start."""
    addresses = sum(
        num_rows * shape.num_blocks * shape.num_layers * sum(shape.pieces) for shape in ranges
    )
    lost = format_bytes(sum(shape.most_lost_bytes for shape in ranges))
    what = f"KV ranges: {format_bytes(addresses)} of addresses for {num_rows:,} requests"
    return f"{what}; the end of each takes up to {lost} more than its blocks"


class VirtualPlaces:
    """The range of row r and group g begins at the block r * ranges[g].num_blocks."""

    def __init__(self, kv: OnDemandKvCache, ranges: Sequence[RangeShape], *, num_rows: int) -> None:
        self.num_bytes: int | None = 0
        self._groups = [
            _GroupPlaces(kv, group, shape, num_rows) for group, shape in enumerate(ranges)
        ]

    def put(self, group: int, row: int, first: int, block_ids: Sequence[int]) -> NDArray[np.int32]:
        places = self._groups[group].put(row, first, np.array(block_ids, np.int32))
        self._count()
        return places

    def find(self, group: int, block_id: int) -> int:
        return int(self._groups[group].places[block_id])

    def clear(self, row: int) -> None:
        for group in self._groups:
            group.clear(row)
        self._count()

    def _count(self) -> None:
        self.num_bytes = sum(group.num_bytes for group in self._groups)


class _GroupPlaces:
    """Of one cache group. A block id has at most one place, so no more blocks have memory than
    there are ids.
    """

    def __init__(self, kv: OnDemandKvCache, group: int, shape: RangeShape, num_rows: int) -> None:
        self.places = np.full(shape.num_ids, NOWHERE, np.int32)
        """By block id"""
        self.num_bytes = 0
        self._ids = np.full(num_rows * shape.num_blocks, NOWHERE, np.int32)
        """By place"""
        self._firsts, self._ends = [0] * num_rows, [0] * num_rows
        """Per row the blocks of its range that may have memory"""
        self._kv, self._group, self._shape = kv, group, shape

    def put(self, row: int, first: int, block_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        found = (
            np.arange(first, first + len(block_ids), dtype=np.int32) + row * self._shape.num_blocks
        )
        found[block_ids < 0] = NOWHERE
        live = block_ids[block_ids >= 0]
        for place in self.places[live]:
            if place != NOWHERE:
                self._leave(int(place))
        self.places[live] = found[block_ids >= 0]
        self._ids[found[block_ids >= 0]] = live
        self._hold(row, self._firsts[row], max(self._ends[row], first + len(block_ids)))
        return found

    def clear(self, row: int) -> None:
        if not self._ends[row]:
            return
        begin, end = row * self._shape.num_blocks, (row + 1) * self._shape.num_blocks
        ids = self._ids[begin:end]
        self.places[ids[ids >= 0]] = NOWHERE
        ids[:] = NOWHERE
        self._kv.give_back(self._group, begin, self._shape.num_blocks)
        self._hold(row, 0, 0)

    def _leave(self, place: int) -> None:
        """The id of a block behind a window is given to another: nobody reads it any more, nor what
        comes before it in its range.
        """
        row, index = divmod(place, self._shape.num_blocks)
        self._ids[place] = NOWHERE
        if index >= self._firsts[row]:
            self._kv.give_back(self._group, row * self._shape.num_blocks, index + 1)
            self._hold(row, index + 1, self._ends[row])

    def _hold(self, row: int, first: int, end: int) -> None:
        self.num_bytes -= self._shape.bytes_of(self._firsts[row], self._ends[row])
        self._firsts[row], self._ends[row] = first, end
        self.num_bytes += self._shape.bytes_of(first, end)
