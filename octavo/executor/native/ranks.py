"""Collectives between ranks on one machine, over shared memory and futexes.

Owns the memory file that all ranks map; csrc/runtime/shared_ranks.h implements the collectives.
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
    """The first rank's memory file, inherited by the other ranks as a file descriptor.

    Implements `ranks.RankRendezvous`.
    """

    def __init__(self) -> None:
        self.address: int = _file_in_memory()
        """File descriptor, in this process and in those that inherit it."""

    def get_address(self, rank: int) -> list[int]:
        return [self.address]

    def get_inherited(self, rank: int) -> tuple[int, ...]:
        return (self.address,)

    def close(self) -> None:
        """Closes the descriptor; the memory remains while a rank maps it."""
        os.close(self.address)


class SharedMemoryRanks:
    """This process's rank in a group of ranks that share memory. Implements `ranks.Ranks`."""

    def __init__(self, grid: RankGrid, file: int) -> None:
        """`file` is the descriptor of a `SharedMemory`; it may be closed afterwards."""
        self.shared: Any = native_module().SharedRanks(
            file, grid.rank, grid.num_ranks, grid.num_tensor
        )
        """The native object, which executors use for their collectives."""
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
        collected = np.empty(x.shape, np.float32)
        owner_ranks = np.ascontiguousarray(owners, np.int32)
        self.shared.collect(np.ascontiguousarray(x, np.float32), owner_ranks, collected)
        return collected

    def from_first(self, x: NDArray[Any]) -> NDArray[Any]:
        """Broadcasts the first rank's x in place, if contiguous."""
        try:
            self.shared.from_first(x.reshape(-1).view(np.uint8))
        except native_module().RanksAborted as error:
            raise EngineDead(str(error)) from None
        return x

    def abort(self) -> None:
        self.shared.abort()


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """This process's rank among the ranks of several engines that share their experts."""

    ranks: SharedMemoryRanks
    """Ranks of all engines, engine by engine; experts are numbered across all of them."""
    num_engines: int

    def abort(self) -> None:
        self.ranks.abort()


def _file_in_memory() -> int:
    """Creates an anonymous file and returns its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("octavo-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
