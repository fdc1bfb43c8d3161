"""Worker half of a prefix cache shared by several engines: blocks in slots of host memory, backed
by a `MooncakePool`.

Owns the slots' memory and two threads: one reads from the store and one writes to it, each several
blocks at a time. A value has the format of `block_file.py` and is verified when it is read. Any
failure is a miss; after a failed write, or after a slow read that failed, the store is not written
or read for a while.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from octavo.distributed.pool.mooncake_pool import MooncakePool, StoreValue
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
    StoredBytes,
)
from octavo.worker.cache_engine import HostShape
from octavo.worker.kv_connectors.block_file import make_header
from octavo.worker.kv_connectors.checksum import CHECKSUM, get_checksum

logger = logging.getLogger(__name__)

OVERDUE_S = 5.0
"""Seconds after which a request that waits for the store is computed instead."""
PAUSE_S = 30.0
"""Pause in seconds after a failed write."""
READ_PAUSE_S = 5.0
"""Pause in seconds after a slow read that failed."""
LONG_S = 0.5
"""Duration in seconds from which a read counts as slow."""
CLOSE_S = 3.0
"""Seconds for which each thread may continue after the engine has closed."""
MAX_BATCH = 32
"""Number of blocks read or written together."""
HEADER_BYTES = 1024
"""Maximum size of a block's header; blocks with a larger one are not stored."""

EMPTY = ConnectorReport()


class PoolWorker:
    """Implements `ports.ConnectorWorker`."""

    def __init__(
        self, shapes: Sequence[HostShape], store: MooncakePool, fingerprint: bytes
    ) -> None:
        self._slots = [
            np.empty((shape.num_blocks, shape.block_bytes), np.uint8) for shape in shapes
        ]
        self._store = store
        self._fingerprint = fingerprint
        self._prefix = f"{fingerprint.hex()[:32]}/"
        self._report = ConnectorReport()
        self._changed = threading.Condition()
        """Condition for the report and pending blocks; notified when something is added."""
        self._fetching: dict[BlockHashWithGroupId, float] = {}
        """Start of each fetch that is not overdue, on the monotonic clock."""
        self._num_under_way = 0
        self._num_damaged = self._num_write_errors = 0
        self.writes_from = self.reads_from = 0.0
        """Times on the monotonic clock until which the store is not written or read."""
        self._pins: dict[BlockHashWithGroupId, float] = {}
        """Times until which blocks are pinned, in seconds since 1970."""
        largest = max(shape.block_bytes for shape in shapes) + HEADER_BYTES
        self._reader = _BatchThread("octavo-pool-read", self._fetch, self._buffers(largest))
        self._writer = _BatchThread("octavo-pool-write", self._keep, self._buffers(largest))

    def _buffers(self, num_bytes: int) -> NDArray[np.uint8]:
        """Returns registered memory for one thread's values."""
        buffers = np.zeros((MAX_BATCH, num_bytes), np.uint8)
        self._store.register(buffers.reshape(-1))
        return buffers

    def slot(self, group: int, slot: int) -> NDArray[np.uint8]:
        slot_bytes: NDArray[np.uint8] = self._slots[group][slot]
        return slot_bytes

    def begin(self, plan: ConnectorPlan) -> None:
        with self._changed:
            self._num_under_way += len(plan.fetch) + len(plan.keep)
            now = time.monotonic()
            self._fetching.update(dict.fromkeys((block.name for block in plan.fetch), now))
            self._pins |= dict(plan.pin)
        if plan.forget_all:
            self._writer.call(lambda: self._store.remove_all(self._prefix))
        self._reader.put(plan.fetch)
        self._writer.put(plan.keep)
        for name in plan.forget:
            self._writer.call(partial(self._store.remove, self._get_key(name)))

    def report(self, *, wait_s: float) -> ConnectorReport | None:
        with self._changed:
            if self._report == EMPTY and self._num_under_way and wait_s:
                self._changed.wait(wait_s)
            since = time.monotonic() - OVERDUE_S
            overdue = [name for name, began in self._fetching.items() if began < since]
            for name in overdue:
                del self._fetching[name]
            self._report.overdue += overdue
            report, self._report = self._report, ConnectorReport()
        if report == EMPTY:
            return None
        report.stored = StoredBytes(
            num_damaged=self._num_damaged, num_write_errors=self._num_write_errors
        )
        return report

    def close(self) -> None:
        """Ends the threads; a thread that is blocked by the store is abandoned."""
        has_ended = [thread.close(CLOSE_S) for thread in (self._reader, self._writer)]
        if all(has_ended):
            self._store.close()

    def _get_key(self, name: BlockHashWithGroupId) -> str:
        return f"{self._prefix}{name.digest.hex()}-{name.group}"

    # -- in the threads ----------------------------------------------------------------------------

    def _fetch(self, blocks: Sequence[SlotBlock], buffers: NDArray[np.uint8]) -> None:
        """Reads blocks into their slots through the thread's memory, and reports each."""
        have_come = [False] * len(blocks)
        try:
            if time.monotonic() >= self.reads_from:
                have_come = self._read(blocks, buffers)
        finally:
            with self._reporting() as report:
                for block, has_come in zip(blocks, have_come, strict=True):
                    self._fetching.pop(block.name, None)
                    self._num_under_way -= 1
                    (report.fetched if has_come else report.not_fetched).append(block.name)

    def _read(self, blocks: Sequence[SlotBlock], buffers: NDArray[np.uint8]) -> list[bool]:
        values = [
            self._value(block, buffer) for block, buffer in zip(blocks, buffers, strict=False)
        ]
        began = time.monotonic()
        try:
            is_read = self._store.get([value for value in values if value is not None])
        except Exception as error:
            logger.warning("KV blocks of the pool are recomputed: %s", error)
            is_read = []
        if not any(is_read) and time.monotonic() - began > LONG_S:
            self.reads_from = time.monotonic() + READ_PAUSE_S
        outcomes = iter(is_read)
        return [
            value is not None and next(outcomes, False) and self._take(block, value.data)
            for block, value in zip(blocks, values, strict=True)
        ]

    def _value(self, block: SlotBlock, buffer: NDArray[np.uint8]) -> StoreValue | None:
        """Returns a block's value in a buffer; None if the buffer is too small."""
        num_bytes = len(self._header(block)) + self._slot_bytes(block) + CHECKSUM.size
        if num_bytes > len(buffer):
            return None
        is_pinned = self._pins.get(block.name, 0.0) > time.time()
        return StoreValue(self._get_key(block.name), buffer[:num_bytes], is_pinned)

    def _header(self, block: SlotBlock) -> bytes:
        return make_header(self._fingerprint, block.group, block.key, self._slot_bytes(block))

    def _slot_bytes(self, block: SlotBlock) -> int:
        return int(self._slots[block.group].shape[1])

    def _take(self, block: SlotBlock, data: NDArray[np.uint8]) -> bool:
        """Copies a value's block into its slot; returns False if it is a different block or
        damaged.
        """
        header, end = self._header(block), len(data) - CHECKSUM.size
        (checksum,) = CHECKSUM.unpack(data[end:].tobytes())
        if data[: len(header)].tobytes() != header or get_checksum(data[:end]) != checksum:
            logger.warning("a KV block of the pool is damaged and is recomputed")
            self._num_damaged += 1
            return False
        self.slot(block.group, block.slot)[:] = data[len(header) : end]
        return True

    def _keep(self, blocks: Sequence[SlotBlock], buffers: NDArray[np.uint8]) -> None:
        """Writes blocks from their slots through the thread's memory, and reports each."""
        are_kept = [False] * len(blocks)
        try:
            if time.monotonic() >= self.writes_from:
                are_kept = self._write(blocks, buffers)
        finally:
            with self._reporting() as report:
                for block, is_kept in zip(blocks, are_kept, strict=True):
                    self._num_under_way -= 1
                    (report.kept if is_kept else report.not_kept).append(block.name)

    def _write(self, blocks: Sequence[SlotBlock], buffers: NDArray[np.uint8]) -> list[bool]:
        values = [
            self._value(block, buffer) for block, buffer in zip(blocks, buffers, strict=False)
        ]
        stored_values = []
        for block, value in zip(blocks, values, strict=True):
            if value is not None:
                self._lay_out(block, value.data)
                stored_values.append(value)
        reason = "some were refused"
        try:
            stored = self._store.put(stored_values)
        except Exception as error:
            stored, reason = [], str(error)
        if len(stored) < len(stored_values) or not all(stored):
            logger.warning("pausing writes to the pool for %.0f s: %s", PAUSE_S, reason)
            self._num_write_errors += len(stored_values) - sum(stored)
            self.writes_from = time.monotonic() + PAUSE_S
        outcomes = iter(stored)
        return [value is not None and next(outcomes, False) for value in values]

    def _lay_out(self, block: SlotBlock, data: NDArray[np.uint8]) -> None:
        header, end = self._header(block), len(data) - CHECKSUM.size
        data[: len(header)] = np.frombuffer(header, np.uint8)
        data[len(header) : end] = self.slot(block.group, block.slot)
        data[end:] = np.frombuffer(CHECKSUM.pack(get_checksum(data[:end])), np.uint8)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[ConnectorReport]:
        with self._changed:
            yield self._report
            self._changed.notify_all()


DoBlocks = Callable[[Sequence[SlotBlock], NDArray[np.uint8]], None]
"""Moves blocks through a thread's memory, `[buffers, bytes]`."""


class _BatchThread:
    """A thread that processes queued blocks in batches, each as large as its number of buffers;
    function calls can be queued too.
    """

    def __init__(self, name: str, do: DoBlocks, buffers: NDArray[np.uint8]) -> None:
        self._do = do
        self._buffers = buffers
        self._waiting: queue.SimpleQueue[SlotBlock | Callable[[], None] | None]
        self._waiting = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, blocks: Sequence[SlotBlock]) -> None:
        for block in blocks:
            self._waiting.put(block)

    def call(self, function: Callable[[], None]) -> None:
        self._waiting.put(function)

    def close(self, timeout_s: float) -> bool:
        """Ends the thread; returns whether it has ended in time."""
        self._is_closing = True
        self._waiting.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            blocks: list[SlotBlock] = []
            following: SlotBlock | Callable[[], None] | None = first
            while isinstance(following, SlotBlock):
                blocks.append(following)
                if len(blocks) == len(self._buffers) or self._waiting.empty():
                    break
                following = self._waiting.get()
            try:
                if blocks:
                    self._do(blocks, self._buffers)
                if following is None or self._is_closing:
                    return
                if not isinstance(following, SlotBlock):
                    following()
            except Exception:
                logger.exception("the pool thread continues after an error")
