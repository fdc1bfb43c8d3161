"""Reads blocks out of other engines' memory in a thread of its own, and checks what has come."""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kv_messages import BlockName
from octavo.transfer.block_transport import BlockTransport, RemoteBytes

MOST_BLOCKS = 64
"""Blocks that are read in one batch."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """A block that lies in another engine's memory, and the slot that it is read into."""

    name: BlockName
    session: str
    address: int
    checksum: int
    slot: NDArray[np.uint8]


class BlockReader:
    """The reads that one worker has under way, in the order in which they were asked for."""

    def __init__(self, mover: BlockTransport) -> None:
        self._mover = mover
        self._asked: queue.SimpleQueue[OfferedBlock | None] = queue.SimpleQueue()
        self._done: deque[tuple[BlockName, bool]] = deque()
        self._num_under_way = 0
        self._rates: deque[tuple[int, float]] = deque()
        """Bytes of each read that has come whole, and its seconds."""
        self._thread = threading.Thread(target=self._run, name="octavo-kv-read", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether an outcome is still to be taken."""
        return self._num_under_way > 0

    def read(self, block: OfferedBlock) -> None:
        """Asks for a block, whose slot is written until the outcome is taken."""
        self._num_under_way += 1
        self._asked.put(block)

    def take_done(self) -> list[tuple[BlockName, bool]]:
        """Returns the blocks whose reads are over, and whether each has come unharmed."""
        done = [self._done.popleft() for _ in range(len(self._done))]
        self._num_under_way -= len(done)
        return done

    def take_rate(self) -> tuple[int, float]:
        """Returns the bytes read since the last call, and the seconds in which they came."""
        reads = [self._rates.popleft() for _ in range(len(self._rates))]
        return sum(num_bytes for num_bytes, _ in reads), sum(seconds for _, seconds in reads)

    def close(self, timeout_s: float) -> None:
        """Ends the thread, and gives the mover's memory back unless a read is stuck."""
        self._asked.put(None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._mover.close()

    def _run(self) -> None:
        waiting: deque[OfferedBlock] = deque()
        while True:
            if not waiting:
                block = self._asked.get()
                if block is None:
                    return
                waiting.append(block)
            while not self._asked.empty():
                block = self._asked.get()
                if block is None:
                    return
                waiting.append(block)
            batch = [waiting.popleft()]
            while waiting and waiting[0].session == batch[0].session and len(batch) < MOST_BLOCKS:
                batch.append(waiting.popleft())
            self._done.extend(self._read(batch))

    def _read(self, batch: Sequence[OfferedBlock]) -> list[tuple[BlockName, bool]]:
        wanted = [RemoteBytes(block.address, block.slot) for block in batch]
        began = time.monotonic()
        try:
            has_come = self._mover.read(batch[0].session, wanted)
        except Exception:
            logger.exception("KV blocks of %s could not be read", batch[0].session)
            has_come = False
        if has_come:
            num_bytes = sum(len(block.slot) for block in batch)
            self._rates.append((num_bytes, time.monotonic() - began))
        return [
            (block.name, has_come and zlib.crc32(block.slot.data) == block.checksum)
            for block in batch
        ]
