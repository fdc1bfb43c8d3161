"""Send buffer: KV blocks that other engines may fetch, and the peers waiting for blocks.

A lease keeps a block until it is fetched. A peer that reads a block directly from this engine's
memory also holds a lease, which it renews or ends; the lease expires if the peer is silent. Blocks
without a lease are evicted in LRU order. Has no clock and no sockets: times are arguments, and
`block_sender.py` owns the sockets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.distributed.transfer.messages import WantedBlock
from octavo.engine.protocol.kv_messages import BlockHashWithGroupId, BlockKey
from octavo.worker.kv_connectors.checksum import get_checksum

LEASE_S = 30.0
"""Duration of a lease in seconds."""
MAX_WAITING = 1 << 16
"""Maximum number of blocks that peers may wait for at once; further requested blocks are reported
as absent.
"""


BlockData = bytes | NDArray[np.uint8]
"""Bytes of a block: a copy, or a view of memory that peers read directly."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A peer's request for blocks, identified by the peer and the epoch that the reply repeats."""

    peer: bytes
    epoch: int
    heads: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """Requested KV heads of each cache group, as half-open ranges."""


@dataclass(slots=True)
class SendBufferBlock:
    key: BlockKey
    data: BlockData
    leased_until: float
    """End of the lease until the first fetch; 0 after it."""
    checksum: int = 0
    """Checksum of bytes that peers read directly."""
    readers: dict[Ask, float] = field(default_factory=dict)
    """End of each reading peer's lease."""

    def is_leased(self, now: float) -> bool:
        return self.leased_until > now or any(until > now for until in self.readers.values())


@dataclass(frozen=True, slots=True)
class Wait:
    """A request for a block that is not computed yet."""

    ask: Ask
    until: float


class SendBuffer:
    """Buffers blocks by name, up to `max_bytes`. All times are from one monotonic clock."""

    def __init__(
        self, max_bytes: int, release: Callable[[BlockData], None] = lambda data: None
    ) -> None:
        """`release` is called with the bytes of each removed block."""
        self._release = release
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[BlockHashWithGroupId, SendBufferBlock] = OrderedDict()
        """Blocks in LRU order."""
        self._waits: dict[BlockHashWithGroupId, list[Wait]] = {}
        self._absent: OrderedDict[BlockHashWithGroupId, float] = OrderedDict()
        """Blocks that will not be computed because their prompt has finished, with the expiry time
        of this entry.
        """
        self.num_expired = 0
        """Number of expired leases: of blocks that no peer fetched, and of reading peers."""

    @property
    def waiting_peers(self) -> set[bytes]:
        """Peers that wait for at least one block."""
        return {wait.ask.peer for waits in self._waits.values() for wait in waits}

    def put(
        self, name: BlockHashWithGroupId, key: BlockKey, data: BlockData, now: float
    ) -> tuple[bool, list[BlockHashWithGroupId]]:
        """Buffers a block; returns whether it fits, and the blocks evicted for it."""
        gone = self.make_room(len(data), now)
        if self.num_bytes + len(data) > self.max_bytes:
            return False, gone
        self._absent.pop(name, None)
        self.remove(name)
        checksum = 0 if isinstance(data, bytes) else get_checksum(data)
        self._blocks[name] = SendBufferBlock(key, data, now + LEASE_S, checksum)
        self.num_bytes += len(data)
        return True, gone

    def make_room(self, num_bytes: int, now: float) -> list[BlockHashWithGroupId]:
        """Evicts blocks without a lease until `num_bytes` fit; returns the evicted blocks."""
        gone = []
        for name, block in list(self._blocks.items()):
            if self.num_bytes + num_bytes <= self.max_bytes:
                break
            if not block.is_leased(now):
                self.num_expired += (block.leased_until > 0) + len(block.readers)
                self.remove(name)
                gone.append(name)
        return gone

    def remove(self, name: BlockHashWithGroupId) -> None:
        block = self._blocks.pop(name, None)
        if block is not None:
            self.num_bytes -= len(block.data)
            self._release(block.data)

    def clear(self) -> None:
        for name in list(self._blocks):
            self.remove(name)

    def take(self, name: BlockHashWithGroupId, key: BlockKey) -> BlockData | None:
        """Returns a block's bytes for a peer that fetches it; None if it is not buffered."""
        block = self._blocks.get(name)
        if block is None or block.key != key:
            return None
        block.leased_until = 0.0
        self._blocks.move_to_end(name)
        return block.data

    def peek(self, name: BlockHashWithGroupId) -> BlockData | None:
        """Returns a block's bytes without changing the LRU order; None if it is not buffered."""
        block = self._blocks.get(name)
        return None if block is None else block.data

    # -- reading peers -----------------------------------------------------------------------------

    def lend(self, name: BlockHashWithGroupId, ask: Ask, now: float) -> int:
        """Starts the lease of a peer that reads a block directly; returns the checksum that the
        peer compares.
        """
        block = self._blocks[name]
        block.readers[ask] = now + LEASE_S
        return block.checksum

    def renew(self, ask: Ask, names: Iterable[BlockHashWithGroupId], now: float) -> None:
        """Renews a peer's leases. An expired lease is not renewed: the memory may hold another
        block, which the peer detects by its checksum.
        """
        for name in names:
            block = self._blocks.get(name)
            if block is not None and block.readers.get(ask, now) > now:
                block.readers[ask] = now + LEASE_S

    def end_leases(self, ask: Ask, names: Iterable[BlockHashWithGroupId]) -> None:
        """Ends a peer's leases; does nothing for leases that have ended."""
        for name in names:
            block = self._blocks.get(name)
            if block is not None:
                block.readers.pop(ask, None)

    # -- waiting peers -----------------------------------------------------------------------------

    def wait(
        self, ask: Ask, wanted_blocks: Iterable[WantedBlock], until: float
    ) -> list[BlockHashWithGroupId]:
        """Registers a peer's latest request for blocks that are not computed yet; returns the
        blocks that are rejected because peers wait for too many.
        """
        refused = []
        for block in wanted_blocks:
            if len(self._waits) < MAX_WAITING:
                others = [w for w in self._waits.get(block.name, ()) if w.ask.peer != ask.peer]
                self._waits[block.name] = [*others, Wait(ask, until)]
            else:
                refused.append(block.name)
        return refused

    def waiting(self, name: BlockHashWithGroupId) -> list[Ask]:
        """Removes and returns the requests that wait for a block."""
        return [wait.ask for wait in self._waits.pop(name, ())]

    def asks(self, name: BlockHashWithGroupId) -> list[Ask]:
        """Returns the requests that wait for a block."""
        return [wait.ask for wait in self._waits.get(name, ())]

    def served(self, ask: Ask, names: Iterable[BlockHashWithGroupId]) -> None:
        """Ends a request's waits for blocks whose layers were streamed to the peer."""
        for name in names:
            self._keep_waits(name, [w for w in self._waits.get(name, ()) if w.ask != ask])

    def ended(self, name: BlockHashWithGroupId, now: float) -> list[Ask]:
        """Records that a block's prompt has finished; returns the requests still waiting for it."""
        if name not in self._blocks:
            self._absent[name] = now + LEASE_S
            if len(self._absent) > MAX_WAITING:
                self._absent.popitem(last=False)
        return self.waiting(name)

    def is_absent(self, name: BlockHashWithGroupId, now: float) -> bool:
        """Returns whether a block is known to be unavailable."""
        return self._absent.get(name, now) > now

    def drop(self, peer: bytes, names: Iterable[BlockHashWithGroupId]) -> None:
        """Ends a peer's waits for these blocks."""
        for name in names:
            self._keep_waits(name, [w for w in self._waits.get(name, ()) if w.ask.peer != peer])

    def expire(self, now: float) -> None:
        """Ends waits that timed out. The peers are not notified: they have the same timeout."""
        for name, waits in list(self._waits.items()):
            self._keep_waits(name, [wait for wait in waits if wait.until > now])

    def _keep_waits(self, name: BlockHashWithGroupId, waits: list[Wait]) -> None:
        if waits:
            self._waits[name] = waits
        else:
            self._waits.pop(name, None)
