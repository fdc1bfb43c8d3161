"""The port to a store that several engines share, of values in registered memory by their keys.

Nothing that a store says is relied on but the bytes it gives, which are checked. Any method may
raise: to its callers that is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StoreValue:
    """A key, and the registered bytes that go there or come from there."""

    key: str
    data: NDArray[np.uint8]
    is_pinned: bool = False
    """Whether the store is asked to evict it late."""


class SharedStore(Protocol):
    """A store of values."""

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Makes memory known before values lie in it; it must outlive the store."""
        ...

    def put(self, values: Sequence[StoreValue]) -> list[bool]:
        """Stores values; returns which of them are there afterwards."""
        ...

    def get(self, values: Sequence[StoreValue]) -> list[bool]:
        """Reads values of exactly the given sizes; returns which of them have come."""
        ...

    def remove(self, key: str) -> None: ...

    def remove_all(self, prefix: str) -> None:
        """Removes all keys that begin alike."""
        ...

    def close(self) -> None: ...
