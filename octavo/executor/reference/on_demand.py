"""NumPy arrays over pages of the system: addresses are reserved at once, memory is taken where
something is written, and given back on request.

Knows shapes and pages, and nothing of blocks' contents.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""Value of MAP_NORESERVE, which Python's mmap has no name for before 3.13; it is the same on all
processors that we build for."""


class OnDemandArrays:
    """Arrays `[layers, blocks, ...]` of zeros, one for each shape."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> None:
        """Reserves addresses; MemoryError where the system has too few."""
        self._maps = [_map(math.prod(shape) * dtype.itemsize) for shape in shapes]
        self.arrays: list[NDArray[Any]] = [
            np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)
            for memory, shape in zip(self._maps, shapes, strict=True)
        ]

    def give_back(self, first_block: int, num_blocks: int) -> None:
        """Gives back the whole pages of these blocks, in every array and layer."""
        for memory, array in zip(self._maps, self.arrays, strict=True):
            for layer in range(len(array)):
                begin = layer * array.strides[0] + first_block * array.strides[1]
                first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (begin + num_blocks * array.strides[1]) // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    memory.madvise(mmap.MADV_DONTNEED, first, end - first)


def _map(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(
            -1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        )
    except OSError as error:
        raise MemoryError(str(error)) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
