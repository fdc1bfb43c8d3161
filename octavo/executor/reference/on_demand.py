"""NumPy arrays over reserved address space: memory is committed on write and can be released."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python's mmap lacks before 3.13; the value is the same on all supported
processors."""


class OnDemandArrays:
    """Zero arrays `[layers, blocks, ...]`, one per shape."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> None:
        """Reserves addresses; raises MemoryError if the system cannot."""
        self._maps = [_map(math.prod(shape) * dtype.itemsize) for shape in shapes]
        self.arrays: list[NDArray[Any]] = [
            np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)
            for memory, shape in zip(self._maps, shapes, strict=True)
        ]

    def give_back(self, first_block: int, num_blocks: int) -> None:
        """Releases the complete pages of these blocks, in every array and layer."""
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
