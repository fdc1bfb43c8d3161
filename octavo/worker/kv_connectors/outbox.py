"""KV blocks that other engines may fetch: those that are there, and who waits for those to come.

A block that was not fetched stays for a lease, and so does one that a peer reads out of this
engine's memory, which the peer renews or ends; a peer of which nothing is heard loses it. Of blocks
without a lease the least recently used go first. Reads no clock and knows no socket:
`block_sender.py` sends what it is told to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.kv_messages import BlockKey, BlockName
from octavo.transfer.messages import WantedBlock
from octavo.worker.kv_connectors.checksum import checksum_of

LEASE_S = 30.0
"""Seconds for which a block that was not fetched yet, or that a peer reads, keeps its place."""
MAX_WAITING = 1 << 16
"""Most blocks that are waited for at once; further ones are answered as absent."""


BlockData = bytes | NDArray[np.uint8]
"""Bytes of a block: its own, or in memory that others read."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A peer that asked for a block, and the epoch of its ask, which the answer repeats."""

    peer: bytes
    epoch: int
    heads: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """KV heads that it wants of each cache group's blocks, from one up to another."""


@dataclass(slots=True)
class OutboxBlock:
    """The bytes of a block."""

    key: BlockKey
    data: BlockData
    leased_until: float
    """When the lease of a block that no peer has fetched ends."""
    checksum: int = 0
    """Checksum of bytes that others read out of memory."""
    readers: dict[Ask, float] = field(default_factory=dict)
    """When the lease of each ask whose peer reads it ends."""

    def is_leased(self, now: float) -> bool:
        return self.leased_until > now or any(until > now for until in self.readers.values())


@dataclass(frozen=True, slots=True)
class Wait:
    """An ask for a block that is not there yet."""

    ask: Ask
    until: float


class Outbox:
    """Keeps blocks by name, `max_bytes` at most. All times are of one monotonic clock."""

    def __init__(
        self, max_bytes: int, release: Callable[[BlockData], None] = lambda data: None
    ) -> None:
        """`release` is told of the bytes of each block that goes."""
        self._release = release
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[BlockName, OutboxBlock] = OrderedDict()
        """Blocks, the least recently used first."""
        self._waits: dict[BlockName, list[Wait]] = {}
        self._absent: OrderedDict[BlockName, float] = OrderedDict()
        """Blocks whose prompts have ended without them, until their lease would have ended."""
        self.num_expired = 0
        """Number of leases that have ended by the clock: of a block that no peer fetched and of
        peers that were reading one."""

    @property
    def waiting_peers(self) -> set[bytes]:
        """Peers that wait for any block."""
        return {wait.ask.peer for waits in self._waits.values() for wait in waits}

    def put(
        self, name: BlockName, key: BlockKey, data: BlockData, now: float
    ) -> tuple[bool, list[BlockName]]:
        """Keeps a block's bytes; returns whether there was room, and the blocks that went for
        it.
        """
        gone = self.make_room(len(data), now)
        if self.num_bytes + len(data) > self.max_bytes:
            return False, gone
        self._absent.pop(name, None)
        self.remove(name)
        checksum = 0 if isinstance(data, bytes) else checksum_of(data)
        self._blocks[name] = OutboxBlock(key, data, now + LEASE_S, checksum)
        self.num_bytes += len(data)
        return True, gone

    def make_room(self, num_bytes: int, now: float) -> list[BlockName]:
        """Lets go of blocks whose lease has ended until there is room, and returns them."""
        gone = []
        for name, block in list(self._blocks.items()):
            if self.num_bytes + num_bytes <= self.max_bytes:
                break
            if not block.is_leased(now):
                self.num_expired += (block.leased_until > 0) + len(block.readers)
                self.remove(name)
                gone.append(name)
        return gone

    def remove(self, name: BlockName) -> None:
        """Lets go of a block; one that is not there is left alone."""
        block = self._blocks.pop(name, None)
        if block is not None:
            self.num_bytes -= len(block.data)
            self._release(block.data)

    def clear(self) -> None:
        for name in list(self._blocks):
            self.remove(name)

    def take(self, name: BlockName, key: BlockKey) -> BlockData | None:
        """Returns a block's bytes for a peer that fetches it; None where it is not there."""
        block = self._blocks.get(name)
        if block is None or block.key != key:
            return None
        block.leased_until = 0.0
        self._blocks.move_to_end(name)
        return block.data

    def look(self, name: BlockName) -> BlockData | None:
        """Returns a block's bytes, which does not count as a use; None where it is not there."""
        block = self._blocks.get(name)
        return None if block is None else block.data

    # -- who reads ---------------------------------------------------------------------------------

    def lend(self, name: BlockName, ask: Ask, now: float) -> int:
        """Begins the lease of a peer that will read a block out of memory; returns the checksum
        that it will compare.
        """
        block = self._blocks[name]
        block.readers[ask] = now + LEASE_S
        return block.checksum

    def renew(self, ask: Ask, names: Iterable[BlockName], now: float) -> None:
        """Begins a peer's leases again. One that has ended by the clock is gone: the block's place
        may have other bytes, which the peer finds by its checksum.
        """
        for name in names:
            block = self._blocks.get(name)
            if block is not None and block.readers.get(ask, now) > now:
                block.readers[ask] = now + LEASE_S

    def give_back(self, ask: Ask, names: Iterable[BlockName]) -> None:
        """Ends a peer's leases, of whatever outcome; the second time does nothing."""
        for name in names:
            block = self._blocks.get(name)
            if block is not None:
                block.readers.pop(ask, None)

    # -- who waits ---------------------------------------------------------------------------------

    def wait(self, ask: Ask, wanted: Iterable[WantedBlock], until: float) -> list[BlockName]:
        """Notes that a peer waits for blocks, by its newest ask; returns those for which too many
        wait already.
        """
        refused = []
        for block in wanted:
            if len(self._waits) < MAX_WAITING:
                others = [w for w in self._waits.get(block.name, ()) if w.ask.peer != ask.peer]
                self._waits[block.name] = [*others, Wait(ask, until)]
            else:
                refused.append(block.name)
        return refused

    def waiting(self, name: BlockName) -> list[Ask]:
        """Returns the asks that wait for a block, and ends their waits."""
        return [wait.ask for wait in self._waits.pop(name, ())]

    def asks(self, name: BlockName) -> list[Ask]:
        """Returns the asks that wait for a block."""
        return [wait.ask for wait in self._waits.get(name, ())]

    def served(self, ask: Ask, names: Iterable[BlockName]) -> None:
        """Ends the waits of an ask whose peer has been sent some blocks that are not here yet."""
        for name in names:
            self._keep_waits(name, [w for w in self._waits.get(name, ()) if w.ask != ask])

    def ended(self, name: BlockName, now: float) -> list[Ask]:
        """Notes that a block's prompt has ended; returns the asks that wait for it in vain."""
        if name not in self._blocks:
            self._absent[name] = now + LEASE_S
            if len(self._absent) > MAX_WAITING:
                self._absent.popitem(last=False)
        return self.waiting(name)

    def is_absent(self, name: BlockName, now: float) -> bool:
        """Tells whether a block will not come, as far as is known."""
        return self._absent.get(name, now) > now

    def drop(self, peer: bytes, names: Iterable[BlockName]) -> None:
        """Ends a peer's waits for some blocks."""
        for name in names:
            self._keep_waits(name, [w for w in self._waits.get(name, ()) if w.ask.peer != peer])

    def expire(self, now: float) -> None:
        """Ends the waits whose time is up; their peers have given up by themselves."""
        for name, waits in list(self._waits.items()):
            self._keep_waits(name, [wait for wait in waits if wait.until > now])

    def _keep_waits(self, name: BlockName, waits: list[Wait]) -> None:
        if waits:
            self._waits[name] = waits
        else:
            self._waits.pop(name, None)
