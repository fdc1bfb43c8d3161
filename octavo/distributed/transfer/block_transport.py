"""The port through which blocks' bytes are read out of another engine's memory.

Messages still go over ZeroMQ and say where a block lies; a mover moves the bytes past them. The
reader alone knows when a read is over, and its slots are its own until then: nothing can land in
them later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 1 << 20
"""Most bytes of one piece of a read: a single large one reaches a fraction of the rate."""


@dataclass(frozen=True, slots=True)
class RemoteBytes:
    """Bytes in another engine's memory, and the own memory that they are read into."""

    address: int
    into: NDArray[np.uint8]


class BlockTransport(Protocol):
    """Moves bytes between the registered memories of two engines."""

    @property
    def session(self) -> str:
        """Name by which other engines' movers reach this one."""
        ...

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Makes memory known before the first transfer; it must outlive the mover."""
        ...

    def read(self, session: str, wanted: Sequence[RemoteBytes]) -> Iterator[RemoteBytes]:
        """Reads bytes of another engine, all in one batch. Yields each of them, in their order,
        once it has come, and ends early where the others will not. One thread calls it, and waits.
        """
        ...

    def close(self) -> None: ...


def split_reads(wanted: Sequence[RemoteBytes]) -> list[RemoteBytes]:
    """Returns the same bytes in pieces of at most PIECE_BYTES."""
    return [
        RemoteBytes(one.address + first, one.into[first : first + PIECE_BYTES])
        for one in wanted
        for first in range(0, len(one.into), PIECE_BYTES)
    ]
