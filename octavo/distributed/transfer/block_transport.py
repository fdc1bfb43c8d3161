"""Interface of transports that read blocks from another engine's memory.

Messages over ZeroMQ contain the address of a block; a transport (mover) transfers its bytes. Only
the reader knows when a read has finished. It reserves the slots until then, so late bytes cannot
overwrite other blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 1 << 20
"""Maximum number of bytes of a piece of a read: one large read reaches only a fraction of the
rate.
"""


@dataclass(frozen=True, slots=True)
class RemoteBytes:
    """Bytes in another engine's memory, and the local memory for them."""

    address: int
    into: NDArray[np.uint8]


class BlockTransport(Protocol):
    """Moves bytes between the registered memories of two engines."""

    @property
    def session(self) -> str:
        """Name that other engines' movers use to connect to this one."""
        ...

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Registers memory before the first transfer; it must outlive the mover."""
        ...

    def read(self, session: str, ranges: Sequence[RemoteBytes]) -> Iterator[RemoteBytes]:
        """Reads ranges of another engine's memory in one batch. Yields each range in order after it
        has arrived; ends early if the rest will not arrive. Blocks; called by one thread.
        """
        ...

    def close(self) -> None: ...


def split_reads(ranges: Sequence[RemoteBytes]) -> list[RemoteBytes]:
    """Returns the same bytes in pieces of at most PIECE_BYTES."""
    return [
        RemoteBytes(one.address + first, one.into[first : first + PIECE_BYTES])
        for one in ranges
        for first in range(0, len(one.into), PIECE_BYTES)
    ]
