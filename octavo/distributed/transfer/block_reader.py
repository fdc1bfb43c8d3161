"""Reads blocks from other engines' memory in a background thread, and verifies their checksums."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.distributed.transfer.block_transport import BlockTransport, RemoteBytes
from octavo.engine.protocol.kv_messages import BlockHashWithGroupId
from octavo.worker.kv_connectors.checksum import get_checksum

MAX_BLOCKS = 64
"""Largest number of blocks read in one batch."""

logger = logging.getLogger(__name__)


class PieceKey(NamedTuple):
    """Hash of a block, and the endpoint of the rank that has the block or some of its heads."""

    block: BlockHashWithGroupId
    source: str


@dataclass(frozen=True, slots=True)
class OfferedPiece:
    """A block, or a piece of one, in another engine's memory, and the memory to read it into."""

    name: PieceKey
    session: str
    address: int
    checksum: int
    memory: NDArray[np.uint8]


class BlockReader:
    """Pending reads of one worker, in the order of their requests."""

    def __init__(self, mover: BlockTransport) -> None:
        self._mover = mover
        self._asked: queue.SimpleQueue[OfferedPiece | None] = queue.SimpleQueue()
        self._done: deque[tuple[PieceKey, bool]] = deque()
        self._num_under_way = 0
        self._dropped: set[PieceKey] = set()
        """Cancelled blocks whose results have not been collected."""
        self._rates: deque[tuple[int, float]] = deque()
        """Bytes and duration in seconds of each complete read."""
        self._thread = threading.Thread(target=self._run, name="octavo-kv-read", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a result is pending."""
        return self._num_under_way > 0

    def read(self, block: OfferedPiece) -> None:
        """Requests a block; its slot may be written until the result has been collected."""
        self._num_under_way += 1
        self._asked.put(block)

    def drop(self, name: PieceKey) -> None:
        """Cancels a block whose read has not begun; its result must still be collected."""
        self._dropped.add(name)

    def pop_finished(self) -> list[tuple[PieceKey, bool]]:
        """Returns the finished blocks, and whether each is intact."""
        done = [self._done.popleft() for _ in range(len(self._done))]
        self._num_under_way -= len(done)
        self._dropped.difference_update(name for name, _ in done)
        return done

    def pop_rate(self) -> tuple[int, float]:
        """Returns the bytes read since the last call, and the seconds for them."""
        reads = [self._rates.popleft() for _ in range(len(self._rates))]
        return sum(num_bytes for num_bytes, _ in reads), sum(seconds for _, seconds in reads)

    def close(self, timeout_s: float) -> None:
        """Ends the thread, and releases the mover's memory unless a read is stuck."""
        self._asked.put(None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._mover.close()

    def _run(self) -> None:
        waiting: deque[OfferedPiece] = deque()
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
            while waiting and waiting[0].session == batch[0].session and len(batch) < MAX_BLOCKS:
                batch.append(waiting.popleft())
            left_out = self._dropped & {block.name for block in batch}
            self._done.extend((name, False) for name in left_out)
            self._read([block for block in batch if block.name not in left_out])

    def _read(self, batch: Sequence[OfferedPiece]) -> None:
        """Reads blocks and verifies each one at once, while it is in the CPU's caches."""
        if not batch:
            return
        ranges = [RemoteBytes(block.address, block.memory) for block in batch]
        began, num_come = time.monotonic(), 0
        try:
            for _, block in zip(self._mover.read(batch[0].session, ranges), batch, strict=False):
                is_good = get_checksum(block.memory) == block.checksum
                self._done.append((block.name, is_good))
                num_come += 1
        except Exception:
            logger.exception("KV blocks of %s could not be read", batch[0].session)
        if num_come == len(batch):
            num_bytes = sum(len(block.memory) for block in batch)
            self._rates.append((num_bytes, time.monotonic() - began))
        self._done.extend((block.name, False) for block in batch[num_come:])
