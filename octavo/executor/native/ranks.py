"""Ranks on one machine that exchange numbers through shared memory and futexes, without PyTorch.

Owns the file in memory that all of them map. What they do with it is in
csrc/runtime/shared_ranks.h.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import EngineDead
from octavo.executor.native.extension import native_module
from octavo.executor.rank_grid import RankGrid


class SharedMemory:
    """The first rank's file in memory, whose descriptor the other ranks inherit.

    Implements `ranks.Meeting`.
    """

    def __init__(self) -> None:
        self.address: int = _file_in_memory()
        """Descriptor of the file, in this process and in those that inherit it."""

    def address_of(self, rank: int) -> list[int]:
        return [self.address]

    def inherited_by(self, rank: int) -> tuple[int, ...]:
        return (self.address,)

    def close(self) -> None:
        """Closes the descriptor here; the memory stays as long as a rank maps it."""
        os.close(self.address)


class SharedMemoryRanks:
    """This process's place among ranks that share memory. Implements `ranks.Ranks`."""

    def __init__(self, grid: RankGrid, file: int) -> None:
        """`file` is the descriptor of a `SharedMemory`, which may be closed afterwards."""
        self.shared: Any = native_module().SharedRanks(
            file, grid.rank, grid.num_ranks, grid.num_tensor
        )
        """The native half, which executors take for their collectives."""
        self.grid = grid
        self.rank = grid.rank
        self.num_ranks = grid.num_ranks

    def all_reduce(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        total = np.empty(x.shape, np.float32)
        self.shared.all_reduce(np.ascontiguousarray(x, np.float32), total)
        return total

    def all_gather(self, x: NDArray[np.float32], widths: tuple[int, ...]) -> NDArray[np.float32]:
        joined = np.empty((len(x), sum(widths)), np.float32)
        self.shared.all_gather(np.ascontiguousarray(x, np.float32), joined, list(widths))
        return joined

    def collect(
        self, x: NDArray[np.float32], owners: NDArray[np.integer[Any]]
    ) -> NDArray[np.float32]:
        found = np.empty(x.shape, np.float32)
        places = np.ascontiguousarray(owners, np.int32)
        self.shared.collect(np.ascontiguousarray(x, np.float32), places, found)
        return found

    def from_first(self, x: NDArray[Any]) -> NDArray[Any]:
        """Returns the first rank's x, which replaces the contents of a contiguous x elsewhere."""
        try:
            self.shared.from_first(x.reshape(-1).view(np.uint8))
        except native_module().RanksAborted as error:
            raise EngineDead(str(error)) from None
        return x

    def abort(self) -> None:
        self.shared.abort()


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """This process's place among the ranks of several engines that share their experts."""

    ranks: SharedMemoryRanks
    """Ranks of all engines, engine by engine, whose expert places count through all of them."""
    num_engines: int

    def abort(self) -> None:
        self.ranks.abort()


def _file_in_memory() -> int:
    """Returns the descriptor of an empty file that no other process can open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("octavo-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
