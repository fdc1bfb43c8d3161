"""Registered memory of blocks that other engines may read, divided into equal slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BlockArena:
    """Slots of `place_bytes` each in one array."""

    def __init__(self, num_bytes: int, place_bytes: int) -> None:
        num_places = max(1, num_bytes // place_bytes)
        self.memory: NDArray[np.uint8] = np.empty(num_places * place_bytes, np.uint8)
        """The array, whose pages use no memory until they are written."""
        self._place_bytes = place_bytes
        self._free = list(range(num_places - 1, -1, -1))

    def put(self, data: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Copies bytes into a free slot and returns the copy; None if none is free."""
        assert len(data) <= self._place_bytes, "a block that is larger than a place"
        if not self._free:
            return None
        first = self._free.pop() * self._place_bytes
        place = self.memory[first : first + len(data)]
        place[:] = data
        return place

    def release(self, place: NDArray[np.uint8]) -> None:
        """Frees a slot; its bytes may be overwritten from now on."""
        offset = place.ctypes.data - self.memory.ctypes.data
        self._free.append(offset // self._place_bytes)
