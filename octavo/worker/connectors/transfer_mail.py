"""The sockets of one transfer worker and what is on its way through them.

Answers engines that ask for blocks, from an `Outbox`, and writes what other engines send into
slots. Every ask has an epoch, and what answers an older one lands nowhere. One thread uses it; the
worker of `transfer.py` is that thread's owner.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.step import BlockName, ConnectorPlan, SlotBlock
from octavo.transfer.address import TransferEnds
from octavo.transfer.block_transport import BlockTransport
from octavo.transfer.messages import (
    PART_BYTES,
    BlockAt,
    BlockPart,
    DropBlocks,
    HoldBlocks,
    NoBlocks,
    NotYours,
    StillThere,
    TookBlocks,
    WantBlocks,
    WantedBlock,
    WorkerReplyMessage,
    WorkerRequestMessage,
)
from octavo.transfer.sockets import lock_client, lock_server
from octavo.worker.connectors.block_arena import BlockArena
from octavo.worker.connectors.block_reader import BlockReader, OfferedBlock
from octavo.worker.connectors.link_meter import LinkMeter
from octavo.worker.connectors.outbox import LEASE_S, Ask, BlockData, Outbox

logger = logging.getLogger(__name__)

SIGN_S = 1.0
"""Seconds between two signs of life to a peer that waits for blocks."""
SILENCE_S = 3.0
"""Seconds of silence after which a peer that owes blocks counts as lost."""
RENEWAL_S = LEASE_S / 3
"""Seconds after which the leases of blocks that are still to be read begin again."""
BUSY_MS = 2
"""Milliseconds until a message that a full socket did not take is tried again."""
IDLE_MS = 250
READER_CLOSE_S = 1.0
"""Seconds in which the reader must end."""

PARTS_IN_TURN = 16
"""Messages that one peer is sent before the next one's turn."""


@dataclass(slots=True)
class ArrivingBlock:
    """A block on its way into a slot."""

    block: SlotBlock
    epoch: int
    """Epoch of the ask that it answers."""
    until: float
    """When it is given up, on the monotonic clock."""
    offsets: set[int] = field(default_factory=set)
    """Offsets of the parts that have come."""
    num_bytes: int = 0
    """Bytes that have come."""
    is_read: bool = False
    """Whether a mover writes to the slot, which is no one else's until it has ended."""
    is_dropped: bool = False
    """Whether the block is not wanted any more, once the mover has ended."""


@dataclass(frozen=True, slots=True)
class LeavingPart:
    """A part of a block that is to be sent, from `offset` on."""

    name: BlockName
    data: BlockData
    offset: int
    epoch: int


class Note(Protocol):
    """Function that adds blocks to lists of the next report, by the lists' names."""

    def __call__(self, **found: list[BlockName]) -> None: ...


class TransferMail:
    """The sockets of one worker and what is on its way through them; one thread uses it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        slots: Sequence[NDArray[np.uint8]],
        ends: TransferEnds,
        note: Note,
        mover: BlockTransport | None = None,
    ) -> None:
        self.poller = zmq.Poller()
        self._mover = mover
        self._arena = None if mover is None else _arena_of(mover, slots, ends)
        self.outbox = Outbox(ends.max_bytes, self._release)
        self._reader = None if mover is None else BlockReader(mover)
        self._context = context
        self._slots = slots
        self._ends = ends
        self._note = note
        self._router = self._listen() if ends.listen is not None else None
        self._sources: dict[str, zmq.Socket[bytes]] = {}
        """Sockets to the engines that blocks are fetched from, by address."""
        self._heard: dict[str, float] = {}
        """When each of them was last heard of, or first asked."""
        self._arriving: dict[BlockName, ArrivingBlock] = {}
        self._leaving: defaultdict[bytes, deque[LeavingPart | bytes]] = defaultdict(deque)
        """Messages that a peer's socket did not take yet."""
        self._epoch = 0
        """Epoch of the newest ask."""
        self.link = LinkMeter()
        """Rate at which blocks come from other engines."""
        self._signed_at = self._renewed_at = 0.0
        self._pause_ms = IDLE_MS
        """Milliseconds for which there is nothing to do unless a message comes."""
        self._replies = msgspec.msgpack.Decoder(WorkerReplyMessage)
        self._requests = msgspec.msgpack.Decoder(WorkerRequestMessage)
        self._encode = msgspec.msgpack.Encoder().encode

    def _listen(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        lock_server(router, self._ends.secret)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        assert self._ends.listen is not None
        try:
            router.bind(self._ends.listen)
        except zmq.ZMQError as error:
            router.close()
            raise ConfigError(
                f"kv_transfer_address: its next port, {self._ends.listen}, cannot be listened on:"
                f" {error}"
            ) from error
        self.poller.register(router, zmq.POLLIN)
        return router

    def close(self) -> None:
        for socket in [*self._sources.values(), *([self._router] if self._router else [])]:
            socket.close()
        if self._reader is not None:
            self._reader.close(READER_CLOSE_S)

    def _release(self, data: BlockData) -> None:
        if self._arena is not None:
            assert not isinstance(data, bytes)
            self._arena.release(data)

    # -- what the scheduler half wants -------------------------------------------------------------

    def carry_out(self, plan: ConnectorPlan) -> None:
        """Begins the work of a plan."""
        if plan.forget_all:
            self.outbox.clear()
        for name in plan.forget:
            self.outbox.remove(name)
        wanted: defaultdict[str, list[SlotBlock]] = defaultdict(list)
        for block in plan.fetch:
            wanted[block.source].append(block)
        for source, blocks in wanted.items():
            self._ask(source, blocks)
        for block in plan.keep:
            self._keep(block)
        self._give_up([name for name in dict.fromkeys(plan.cancel) if name in self._arriving])
        self._tell_absent(plan.complete)

    def _ask(self, source: str, blocks: Sequence[SlotBlock]) -> None:
        """Asks another engine for blocks; those that are behind the own slots are in the outbox."""
        if not source:
            for block in blocks:
                data = self.outbox.take(block.name, block.key)
                if data is not None:
                    self._slots[block.group][block.slot][:] = np.frombuffer(data, np.uint8)
                self._note(**{"not_fetched" if data is None else "fetched": [block.name]})
            return
        now = time.monotonic()
        until = now + self._ends.timeout_s
        if not any(one.block.source == source for one in self._arriving.values()):
            self._heard[source] = now
        self._epoch += 1
        self._arriving |= {block.name: ArrivingBlock(block, self._epoch, until) for block in blocks}
        wanted = [WantedBlock(block.group, block.key) for block in blocks]
        message = WantBlocks(self._ends.fingerprint, wanted, self._ends.timeout_s, self._epoch)
        self._send_to_source(source, message)

    def _send_to_source(self, source: str, message: WorkerRequestMessage) -> None:
        try:
            self._socket_to(source).send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the message is lost, as the peer's silence will say
        except zmq.ZMQError as error:
            self._lose(source, f"it cannot be reached: {error}")

    def _socket_to(self, source: str) -> zmq.Socket[bytes]:
        socket = self._sources.get(source)
        if socket is None:
            socket = self._sources[source] = self._context.socket(zmq.DEALER)
            self.poller.register(socket, zmq.POLLIN)
            lock_client(socket, self._ends.secret)
            socket.connect(source)
        return socket

    def _keep(self, block: SlotBlock) -> None:
        """Keeps a block for others and sends it to those that wait for it."""
        now, slot = time.monotonic(), self._slots[block.group][block.slot]
        gone = self.outbox.make_room(len(slot), now)
        data = slot.tobytes() if self._arena is None else self._arena.put(slot)
        has_room = data is not None and self.outbox.put(block.name, block.key, data, now)[0]
        self._note(gone=gone, **{"kept" if has_room else "not_kept": [block.name]})
        if data is None:
            return
        if not has_room:
            self._release(data)
            data = slot.tobytes()
        asks = self.outbox.waiting(block.name)
        if asks and has_room:
            self.outbox.take(block.name, block.key)
        for ask in asks:
            self.send_block(ask, block.name, data)

    def _tell_absent(self, names: Iterable[BlockName]) -> None:
        """Tells those that wait for blocks that these will not come."""
        absent: defaultdict[Ask, list[BlockName]] = defaultdict(list)
        for name in names:
            for ask in self.outbox.ended(name, time.monotonic()):
                absent[ask].append(name)
        for ask, missing in absent.items():
            self._leaving[ask.peer].append(self._encode(NoBlocks(missing, ask.epoch)))

    # -- messages ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits for messages, not for long."""
        self.poller.poll(self._pause_ms)

    def move(self) -> None:
        """Takes in what has come, sends what it can and ends what takes too long."""
        while self._router is not None and self._router.poll(0):
            self._take_request(self._router.recv_multipart())
        for source, socket in list(self._sources.items()):
            while source in self._sources and socket.poll(0):
                self._take_reply(source, socket.recv_multipart(copy=False))
        self._send_leaving()
        self._take_read()
        self._note_time(time.monotonic())
        if self._reader is not None and self._reader.is_busy:
            self._pause_ms = min(self._pause_ms, BUSY_MS)

    def _take_request(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        try:
            message = self._requests.decode(rest[0] if len(rest) == 1 else b"")
        except msgspec.MsgspecError as error:
            self._leaving[peer].append(self._encode(NotYours(f"not understood: {error}")))
            return
        if isinstance(message, DropBlocks):
            self.outbox.drop(peer, message.names)
        elif isinstance(message, HoldBlocks):
            self.outbox.renew(Ask(peer, message.epoch), message.names, time.monotonic())
        elif isinstance(message, TookBlocks):
            self.outbox.give_back(Ask(peer, message.epoch), message.names)
        elif message.fingerprint != self._ends.fingerprint:
            reason = "this engine's blocks have other bytes: model, options or versions differ"
            self._leaving[peer].append(self._encode(NotYours(reason)))
        else:
            self._answer(peer, message)

    def _answer(self, peer: bytes, message: WantBlocks) -> None:
        coming = []
        refused = []
        now = time.monotonic()
        ask = Ask(peer, message.epoch)
        for block in message.blocks:
            data = self.outbox.take(block.name, block.key)
            if data is not None:
                self.send_block(ask, block.name, data)
            elif self.outbox.is_absent(block.name, now):
                refused.append(block.name)
            else:
                coming.append(block)
        wait_s = min(max(0.0, message.wait_s), self._ends.timeout_s)
        refused += self.outbox.wait(ask, coming, now + wait_s)
        if refused:
            self._leaving[peer].append(self._encode(NoBlocks(refused, ask.epoch)))

    def send_block(self, ask: Ask, name: BlockName, data: BlockData) -> None:
        """Sends a block's bytes, or lends those in memory that the peer reads."""
        messages = self._leaving[ask.peer]
        if self._mover is not None and not isinstance(data, bytes):
            self.outbox.lend(name, ask, time.monotonic())
            address, checksum = data.ctypes.data, zlib.crc32(data.data)
            session = self._mover.session
            offer = BlockAt(name, session, address, len(data), checksum, ask.epoch)
            messages.append(self._encode(offer))
            return
        for offset in range(0, len(data), PART_BYTES):
            messages.append(LeavingPart(name, data, offset, ask.epoch))

    def _frames(self, peer: bytes, message: LeavingPart | bytes) -> list[Any]:
        if isinstance(message, bytes):
            return [peer, message]
        part = _view(message.data)[message.offset : message.offset + PART_BYTES]
        size, checksum = len(message.data), zlib.crc32(part)
        has_more = len(self._leaving[peer]) > 1
        head = BlockPart(message.name, size, message.offset, checksum, message.epoch, has_more)
        return [peer, self._encode(head), part]

    def _send_leaving(self) -> None:
        """Sends what the sockets take now, of each peer's messages a few in turn."""
        self._pause_ms = IDLE_MS
        for peer, messages in list(self._leaving.items()):
            try:
                for _ in range(min(PARTS_IN_TURN, len(messages))):
                    assert self._router is not None
                    frames = self._frames(peer, messages[0])
                    self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)
                    messages.popleft()
                if messages:
                    self._pause_ms = 0
                    continue
            except zmq.Again:
                self._pause_ms = BUSY_MS
                continue
            except zmq.ZMQError as error:
                logger.info("a peer that fetched KV blocks is gone: %s", error)
            del self._leaving[peer]

    def _take_reply(self, source: str, frames: Sequence[Any]) -> None:
        try:
            message = self._replies.decode(frames[0].buffer)
        except msgspec.MsgspecError as error:
            self._lose(source, f"it sent what is no message: {error}")
            return
        self._heard[source] = time.monotonic()
        if isinstance(message, BlockPart):
            data = frames[1].buffer if len(frames) == 2 else b""
            self.link.note(source, len(data), self._heard[source], has_more=message.more)
            self._take_part(source, message, data)
        elif isinstance(message, BlockAt):
            self._take_offer(source, message)
        elif isinstance(message, NoBlocks):
            names = [name for name in message.names if self._answers(name, source, message.epoch)]
            self._end(names)
        elif isinstance(message, NotYours):
            self._lose(source, message.reason)

    def _is_from(self, name: BlockName, source: str) -> bool:
        arriving = self._arriving.get(name)
        return arriving is not None and arriving.block.source == source

    def _answers(self, name: BlockName, source: str, epoch: int) -> bool:
        """Returns whether a message answers the ask on which a block is on its way."""
        return self._is_from(name, source) and self._arriving[name].epoch == epoch

    def _take_part(self, source: str, part: BlockPart, data: Any) -> None:
        """Writes a part of a block into its slot; one of another size, or damaged, ends it."""
        if not self._answers(part.name, source, part.epoch):
            return
        arriving = self._arriving[part.name]
        slot = self._slots[arriving.block.group][arriving.block.slot]
        end = part.offset + len(data)
        is_whole = part.num_bytes == len(slot) and 0 <= part.offset < end <= len(slot)
        if not is_whole or zlib.crc32(data) != part.checksum:
            logger.warning("a KV block of %s came damaged; it is computed here", source)
            self._end([part.name])
            return
        if part.offset not in arriving.offsets:
            slot[part.offset : end] = np.frombuffer(data, np.uint8)
            arriving.offsets.add(part.offset)
            arriving.num_bytes += len(data)
        if arriving.num_bytes == len(slot):
            del self._arriving[part.name]
            self._note(fetched=[part.name])

    def _take_offer(self, source: str, offer: BlockAt) -> None:
        """Begins to read a block out of another engine's memory into its slot; gives one back that
        is not to be read.
        """
        if not self._answers(offer.name, source, offer.epoch):
            self._send_to_source(source, TookBlocks([offer.name], offer.epoch))
            return
        arriving = self._arriving[offer.name]
        slot = self._slots[arriving.block.group][arriving.block.slot]
        if self._reader is None or offer.num_bytes != len(slot):
            logger.warning(
                "a KV block of %s is offered in another way; it is computed here", source
            )
            self._end([offer.name])
            self._send_to_source(source, TookBlocks([offer.name], offer.epoch))
        elif not arriving.is_read:
            arriving.is_read = True
            self._reader.read(
                OfferedBlock(offer.name, offer.session, offer.address, offer.checksum, slot)
            )

    def _take_read(self) -> None:
        """Tells of the blocks whose reads are over, also those engines whose memory it was."""
        if self._reader is None:
            return
        taken: defaultdict[tuple[str, int], list[BlockName]] = defaultdict(list)
        self.link.add(*self._reader.take_rate())
        for name, has_come in self._reader.take_done():
            arriving = self._arriving.pop(name)
            taken[arriving.block.source, arriving.epoch].append(name)
            if not has_come:
                logger.warning("a KV block could not be read whole; it is computed here")
            is_good = has_come and not arriving.is_dropped
            self._note(**{"fetched" if is_good else "not_fetched": [name]})
        for (source, epoch), names in taken.items():
            if source in self._sources:
                self._send_to_source(source, TookBlocks(names, epoch))

    def renew_leases(self) -> None:
        """Begins the leases of blocks that are still to be read again."""
        held: defaultdict[tuple[str, int], list[BlockName]] = defaultdict(list)
        for name, arriving in self._arriving.items():
            if arriving.is_read and arriving.block.source in self._sources:
                held[arriving.block.source, arriving.epoch].append(name)
        for (source, epoch), names in held.items():
            self._send_to_source(source, HoldBlocks(names, epoch))

    # -- what does not come ------------------------------------------------------------------------

    def _note_time(self, now: float) -> None:
        self._end([name for name, one in self._arriving.items() if one.until <= now])
        for source in {one.block.source for one in self._arriving.values()}:
            if now - self._heard[source] > SILENCE_S:
                self._lose(source, f"nothing was heard of it for {SILENCE_S:g} s")
        if now - self._renewed_at > RENEWAL_S:
            self._renewed_at = now
            self.renew_leases()
        if now - self._signed_at > SIGN_S:
            self._signed_at = now
            self.outbox.expire(now)
            for peer in self.outbox.waiting_peers:
                self._leaving[peer].append(self._encode(StillThere()))

    def _give_up(self, names: Sequence[BlockName]) -> None:
        """Ends fetches that nothing waits for any more, here and at the other engine."""
        by_source: defaultdict[str, list[BlockName]] = defaultdict(list)
        for name in names:
            by_source[self._arriving[name].block.source].append(name)
        for source, dropped in by_source.items():
            self._send_to_source(source, DropBlocks(dropped))
        self._end([name for name in names if name in self._arriving])

    def _lose(self, source: str, reason: str) -> None:
        """Gives up an engine that owes blocks; it may be asked again later."""
        names = [name for name in self._arriving if self._is_from(name, source)]
        logger.warning(
            "%d KV blocks of %s do not come, they are computed here: %s", len(names), source, reason
        )
        socket = self._sources.pop(source, None)
        if socket is not None:
            self.poller.unregister(socket)
            socket.close()
        self._end(names)

    def _end(self, names: Sequence[BlockName]) -> None:
        """Reports blocks that were not fetched. A slot that a mover writes to is given back when
        that has ended.
        """
        ended = []
        for name in names:
            if self._arriving[name].is_read:
                self._arriving[name].is_dropped = True
            else:
                del self._arriving[name]
                ended.append(name)
        if ended:
            self._note(not_fetched=ended)


def _view(data: BlockData) -> memoryview:
    return memoryview(data) if isinstance(data, bytes) else data.data


def _arena_of(
    mover: BlockTransport, slots: Sequence[NDArray[np.uint8]], ends: TransferEnds
) -> BlockArena | None:
    """Registers the slots, and the memory that others read blocks from, where they may."""
    for group in slots:
        mover.register(group.reshape(-1))
    if ends.listen is None:
        return None
    arena = BlockArena(ends.max_bytes, max(group.shape[1] for group in slots))
    mover.register(arena.memory)
    return arena
