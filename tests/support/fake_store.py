"""A shared store that is a dict, and may be told to fail."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.distributed.pool.mooncake_pool import StoreValue


class FakeStore:
    """A stand-in for `mooncake_pool.MooncakePool`, over values that outlive it."""

    def __init__(self, values: dict[str, bytes] | None = None) -> None:
        self.values = {} if values is None else values
        self.registered: list[NDArray[np.uint8]] = []
        self.pinned: set[str] = set()
        self.num_puts = self.num_gets = 0
        self.fails_reads = self.fails_writes = self.closed = False
        self.delay_s = 0.0
        """Seconds that each read takes."""

    def register(self, memory: NDArray[np.uint8]) -> None:
        self.registered.append(memory)

    def put(self, values: Sequence[StoreValue]) -> list[bool]:
        self.num_puts += 1
        if self.fails_writes:
            raise OSError("a node is gone")
        for value in values:
            self._check(value)
            self.values[value.key] = value.data.tobytes()
            if value.is_pinned:
                self.pinned.add(value.key)
        return [True] * len(values)

    def get(self, values: Sequence[StoreValue]) -> list[bool]:
        self.num_gets += 1
        time.sleep(self.delay_s)
        if self.fails_reads:
            raise OSError("a node is gone")
        found = []
        for value in values:
            self._check(value)
            data = self.values.get(value.key, b"")
            found.append(len(data) == len(value.data))
            if found[-1]:
                value.data[:] = np.frombuffer(data, np.uint8)
        return found

    def remove(self, key: str) -> None:
        self.values.pop(key, None)

    def remove_all(self, prefix: str) -> None:
        for key in [key for key in self.values if key.startswith(prefix)]:
            del self.values[key]

    def close(self) -> None:
        self.closed = True

    def _check(self, value: StoreValue) -> None:
        assert any(np.shares_memory(value.data, memory) for memory in self.registered)
