"""Interface of transports that read blocks from another engine's memory.

Messages over ZeroMQ contain the address of a block; a transport (mover) transfers its bytes. Only
the reader knows when a read has finished, and its slots are reserved until then, so no late bytes
can be written to them.
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
    """Bytes in another engine's memory, and the local memory for them."""

    address: int
    into: NDArray[np.uint8]


class BlockTransport(Protocol):
    """Moves bytes between the registered memories of two engines."""

    @property
    def session(self) -> str:
        """Name by which other engines' movers connect to this one."""
        ...

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Registers memory before the first transfer; it must outlive the mover."""
        ...

    def read(self, session: str, wanted: Sequence[RemoteBytes]) -> Iterator[RemoteBytes]:
        """Reads ranges of another engine's memory in one batch. Yields each range in order after it
        has arrived; ends early if the rest will not arrive. Blocks; called by one thread.
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
