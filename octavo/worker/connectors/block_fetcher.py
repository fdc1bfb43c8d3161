"""The side of a transfer worker that asks other engines for blocks, and writes what comes into the
slots that are held for them.

Every ask has an epoch, and what answers an older one lands nowhere. Whatever does not come, or not
whole, is reported; the prompt is computed here. One thread uses this, that of `transfer_mail.py`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from octavo.kv_messages import BlockName, SlotBlock
from octavo.transfer.address import TransferEnds
from octavo.transfer.block_transport import BlockTransport
from octavo.transfer.messages import (
    BlockAt,
    BlockPart,
    DropBlocks,
    HoldBlocks,
    LayerPart,
    NoBlocks,
    NotYours,
    TookBlocks,
    WantBlocks,
    WantedBlock,
    WorkerReplyMessage,
    WorkerRequestMessage,
)
from octavo.transfer.sockets import lock_client
from octavo.worker.connectors.block_reader import BlockReader, OfferedBlock
from octavo.worker.connectors.byte_cover import ByteCover
from octavo.worker.connectors.checksum import checksum_of
from octavo.worker.connectors.link_meter import LinkMeter
from octavo.worker.connectors.mail_note import Note
from octavo.worker.connectors.outbox import LEASE_S

logger = logging.getLogger(__name__)

SILENCE_S = 3.0
"""Seconds of silence after which a peer that owes blocks counts as lost."""
RENEWAL_S = LEASE_S / 3
"""Seconds after which the leases of blocks that are still to be read begin again."""
READER_CLOSE_S = 1.0
"""Seconds in which the reader must end."""


@dataclass(slots=True)
class ArrivingBlock:
    """A block on its way into a slot."""

    block: SlotBlock
    epoch: int
    """Epoch of the ask that it answers."""
    until: float
    """When it is given up, on the monotonic clock."""
    cover: ByteCover = field(default_factory=ByteCover)
    """Bytes that have come."""
    is_read: bool = False
    """Whether a mover writes to the slot, which is no one else's until it has ended."""
    is_dropped: bool = False
    """Whether the block is not wanted any more, once the mover has ended."""


class BlockFetcher:
    """The sockets to the engines that blocks are fetched from, and the blocks on their way."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        slots: Sequence[NDArray[np.uint8]],
        ends: TransferEnds,
        note: Note,
        *,
        mover: BlockTransport | None,
        poller: zmq.Poller,
    ) -> None:
        """Registers its sockets with `poller` as they come and go."""
        self._context = context
        self._poller = poller
        self._slots = slots
        self._ends = ends
        self._note = note
        self._reader = None if mover is None else BlockReader(mover)
        self._sources: dict[str, zmq.Socket[bytes]] = {}
        """Sockets to the engines that blocks are fetched from, by address."""
        self._heard: dict[str, float] = {}
        """When each of them was last heard of, or first asked."""
        self._arriving: dict[BlockName, ArrivingBlock] = {}
        self._epoch = 0
        """Epoch of the newest ask."""
        self.link = LinkMeter()
        """Rate at which blocks come from other engines."""
        self._renewed_at = 0.0
        self._replies = msgspec.msgpack.Decoder(WorkerReplyMessage)
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def is_reading(self) -> bool:
        """Whether the outcome of a mover's read is still to be taken."""
        return self._reader is not None and self._reader.is_busy

    def close(self) -> None:
        for socket in self._sources.values():
            socket.close()
        if self._reader is not None:
            self._reader.close(READER_CLOSE_S)

    # -- what the scheduler half wants -------------------------------------------------------------

    def ask(self, source: str, blocks: Sequence[SlotBlock]) -> None:
        """Asks another engine for blocks."""
        now = time.monotonic()
        until = now + self._ends.timeout_s
        if not any(one.block.source == source for one in self._arriving.values()):
            self._heard[source] = now
        self._epoch += 1
        self._arriving |= {block.name: ArrivingBlock(block, self._epoch, until) for block in blocks}
        wanted = [WantedBlock(block.group, block.key) for block in blocks]
        message = WantBlocks(self._ends.fingerprint, wanted, self._ends.timeout_s, self._epoch)
        self._send(source, message)

    def give_up(self, names: Sequence[BlockName]) -> None:
        """Ends fetches that nothing waits for any more, here and at the other engine; those that
        have ended are left alone.
        """
        by_source: defaultdict[str, list[BlockName]] = defaultdict(list)
        for name in dict.fromkeys(names):
            if name in self._arriving:
                by_source[self._arriving[name].block.source].append(name)
        for source, dropped in by_source.items():
            self._send(source, DropBlocks(dropped))
            self._end([name for name in dropped if name in self._arriving])

    def _send(self, source: str, message: WorkerRequestMessage) -> None:
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
            self._poller.register(socket, zmq.POLLIN)
            lock_client(socket, self._ends.secret)
            socket.connect(source)
        return socket

    # -- what comes --------------------------------------------------------------------------------

    def take_replies(self) -> None:
        """Takes in what other engines have sent."""
        for source, socket in list(self._sources.items()):
            while source in self._sources and socket.poll(0):
                self._take(source, socket.recv_multipart(copy=False))

    def _take(self, source: str, frames: Sequence[Any]) -> None:
        try:
            message = self._replies.decode(frames[0].buffer)
        except msgspec.MsgspecError as error:
            self._lose(source, f"it sent what is no message: {error}")
            return
        self._heard[source] = time.monotonic()
        if isinstance(message, BlockPart | LayerPart):
            data = frames[1].buffer if len(frames) == 2 else b""
            self.link.note(source, len(data), self._heard[source], has_more=message.more)
            if isinstance(message, BlockPart):
                self._take_part(source, message, data)
            else:
                self._take_layer(source, message, data)
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

    def _slot(self, name: BlockName) -> NDArray[np.uint8]:
        block = self._arriving[name].block
        slot: NDArray[np.uint8] = self._slots[block.group][block.slot]
        return slot

    def _take_part(self, source: str, part: BlockPart, data: Any) -> None:
        """Writes a part of a block into its slot; one of another size, or damaged, ends it."""
        if not self._answers(part.name, source, part.epoch):
            return
        is_whole = part.num_bytes == len(self._slot(part.name))
        if not is_whole or checksum_of(data) != part.checksum:
            self._end_damaged(source, [part.name])
        else:
            self._write(source, part.name, part.offset, data)

    def _take_layer(self, source: str, part: LayerPart, data: Any) -> None:
        """Writes one layer of each of some blocks into their slots; damaged bytes end them all."""
        wanted = {name for name in part.names if self._answers(name, source, part.epoch)}
        size, rest = divmod(len(data), max(1, len(part.names)))
        if rest or checksum_of(data) != part.checksum:
            self._end_damaged(source, sorted(wanted))
            return
        for at, name in enumerate(part.names):
            if name in wanted and name in self._arriving:
                self._write(source, name, part.offset, data[at * size : (at + 1) * size])

    def _write(self, source: str, name: BlockName, offset: int, data: Any) -> None:
        """Writes bytes of a block into its slot; such as lie outside of it end the block."""
        slot, end = self._slot(name), offset + len(data)
        if self._arriving[name].is_read or not 0 <= offset < end <= len(slot):
            self._end_damaged(source, [name])
            return
        slot[offset:end] = np.frombuffer(data, np.uint8)
        cover = self._arriving[name].cover
        cover.add(offset, end)
        if cover.num_bytes == len(slot):
            del self._arriving[name]
            self._note(fetched=[name])

    def _end_damaged(self, source: str, names: Sequence[BlockName]) -> None:
        logger.warning("KV blocks of %s came damaged; they are computed here", source)
        self._end(names)

    def _take_offer(self, source: str, offer: BlockAt) -> None:
        """Begins to read a block out of another engine's memory into its slot; gives one back that
        is not to be read.
        """
        if not self._answers(offer.name, source, offer.epoch):
            self._send(source, TookBlocks([offer.name], offer.epoch))
            return
        arriving, slot = self._arriving[offer.name], self._slot(offer.name)
        if self._reader is None or offer.num_bytes != len(slot):
            logger.warning(
                "a KV block of %s is offered in another way; it is computed here", source
            )
            self._end([offer.name])
            self._send(source, TookBlocks([offer.name], offer.epoch))
        elif not arriving.is_read:
            arriving.is_read = True
            self._reader.read(
                OfferedBlock(offer.name, offer.session, offer.address, offer.checksum, slot)
            )

    def take_read(self) -> None:
        """Tells of the blocks whose reads are over, also those engines whose memory it was."""
        if self._reader is None:
            return
        taken: defaultdict[tuple[str, int], list[BlockName]] = defaultdict(list)
        self.link.add(*self._reader.take_rate())
        for name, has_come in self._reader.take_done():
            arriving = self._arriving.pop(name)
            taken[arriving.block.source, arriving.epoch].append(name)
            if has_come:
                self._heard[arriving.block.source] = time.monotonic()
            elif not arriving.is_dropped:
                logger.warning("a KV block could not be read whole; it is computed here")
            is_good = has_come and not arriving.is_dropped
            self._note(**{"fetched" if is_good else "not_fetched": [name]})
        for (source, epoch), names in taken.items():
            if source in self._sources:
                self._send(source, TookBlocks(names, epoch))

    def renew_leases(self) -> None:
        """Begins the leases of blocks that are still to be read again."""
        held: defaultdict[tuple[str, int], list[BlockName]] = defaultdict(list)
        for name, arriving in self._arriving.items():
            if arriving.is_read and arriving.block.source in self._sources:
                held[arriving.block.source, arriving.epoch].append(name)
        for (source, epoch), names in held.items():
            self._send(source, HoldBlocks(names, epoch))

    # -- what does not come ------------------------------------------------------------------------

    def note_time(self, now: float) -> None:
        """Ends the blocks that take too long, and those of engines that have fallen silent. While
        one's memory is read it need not say anything: a mover notices by itself that it is gone.
        """
        self._end([name for name, one in self._arriving.items() if one.until <= now])
        arriving = list(self._arriving.values())
        being_read = {one.block.source for one in arriving if one.is_read}
        for source in {one.block.source for one in arriving} - being_read:
            if now - self._heard[source] > SILENCE_S:
                self._lose(source, f"nothing was heard of it for {SILENCE_S:g} s")
        if now - self._renewed_at > RENEWAL_S:
            self._renewed_at = now
            self.renew_leases()

    def _lose(self, source: str, reason: str) -> None:
        """Gives up an engine that owes blocks; it may be asked again later."""
        names = [name for name in self._arriving if self._is_from(name, source)]
        logger.warning(
            "%d KV blocks of %s do not come, they are computed here: %s", len(names), source, reason
        )
        socket = self._sources.pop(source, None)
        if socket is not None:
            self._poller.unregister(socket)
            socket.close()
        self._end(names)

    def _end(self, names: Sequence[BlockName]) -> None:
        """Reports blocks that were not fetched. A slot that a mover writes to is given back when
        that has ended.
        """
        ended = []
        for name in names:
            if self._arriving[name].is_read:
                assert self._reader is not None, "it reads"
                self._arriving[name].is_dropped = True
                self._reader.drop(name)
            else:
                del self._arriving[name]
                ended.append(name)
        if ended:
            self._note(not_fetched=ended)
