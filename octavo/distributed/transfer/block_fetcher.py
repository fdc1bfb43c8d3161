"""Receiver of a transfer channel: requests blocks from other engines and writes them into slots.

Every request has an epoch, and replies to older ones are dropped. If the other engine partitions KV
heads differently, a block comes in pieces from several of its ranks. Blocks that do not arrive
completely are reported, and their tokens are computed here. Used by the thread
of `transfer_worker.py`.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from octavo.api.errors import ConfigError
from octavo.distributed.transfer.address import TransferAddresses, split_endpoints
from octavo.distributed.transfer.block_reader import BlockReader, OfferedPiece, PieceKey
from octavo.distributed.transfer.block_transport import BlockTransport
from octavo.distributed.transfer.kv_head_partition import KVHeadPartition
from octavo.distributed.transfer.messages import (
    UNREADABLE,
    BlockAt,
    BlockPart,
    DropBlocks,
    HoldBlocks,
    LayerPart,
    NoBlocks,
    NotYours,
    ReleaseBlocks,
    WantBlocks,
    WantedBlock,
    WorkerReplyMessage,
    WorkerRequestMessage,
)
from octavo.distributed.transfer.send_buffer import LEASE_S
from octavo.distributed.transfer.transfer_status import ReportBlocks
from octavo.engine.protocol.kv_messages import BlockHashWithGroupId, SlotBlock
from octavo.program.program import Span
from octavo.utils.secure_sockets import lock_client
from octavo.worker.kv_connectors.checksum import get_checksum

LEAST_GAP_S = 1e-6
"""Lower bound for the seconds between two parts."""


class ByteCover:
    """A set of byte ranges, which may touch, repeat or overlap."""

    __slots__ = ("_ends", "_starts", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        """Number of bytes in the union of the ranges."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Ends of the merged ranges, in the order of `_starts`; no two of them touch."""

    def add(self, start: int, end: int) -> None:
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        joined = range(first, last)
        self.num_bytes += (
            end - start - sum(self._ends[index] - self._starts[index] for index in joined)
        )
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]


logger = logging.getLogger(__name__)

SILENCE_S = 3.0
"""Seconds of silence after which a peer with pending blocks counts as lost."""
RENEWAL_S = LEASE_S / 3
"""Seconds between renewals of leases of blocks that are still to be read."""
READER_CLOSE_S = 1.0
"""Timeout for the reader's end, in seconds."""
NO_HEADS: Span = (0, 0)
"""Empty range of heads, for cache groups of which nothing is requested."""


@dataclass(slots=True, eq=False)
class ArrivingPiece:
    """Some heads of a block, from one rank of another engine, while they are received."""

    epoch: int
    """Epoch of the request."""
    memory: NDArray[np.uint8]
    """Bytes of the slot that the piece uses until the block is complete."""
    cover: ByteCover = field(default_factory=ByteCover)
    """Bytes received so far."""
    is_read: bool = False
    """Whether a mover is writing to the slot; the slot is reserved until the mover has finished."""


@dataclass(slots=True, eq=False)
class ArrivingBlock:
    """A block that is being received."""

    block: SlotBlock
    until: float
    """Deadline on the monotonic clock."""
    heads: list[Span]
    """Heads of each piece of the block."""
    missing: dict[str, ArrivingPiece] = field(default_factory=dict)
    """Pieces that have not arrived, by endpoint of their rank."""
    is_dropped: bool = False
    """Whether the block is discarded once its movers have finished."""


class BlockFetcher:
    """Sockets to the engines that blocks are fetched from, and the blocks being received."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        slots: Sequence[NDArray[np.uint8]],
        addresses: TransferAddresses,
        note: ReportBlocks,
        *,
        mover: BlockTransport | None,
        heads: KVHeadPartition,
        poller: zmq.Poller,
    ) -> None:
        self._context = context
        self._poller = poller
        self._slots = slots
        self._heads = heads
        self._addresses = addresses
        self._note = note
        self._reader = None if mover is None else BlockReader(mover)
        self._sources: dict[str, zmq.Socket[bytes]] = {}
        """Sockets to the engines that blocks are fetched from, by address."""
        self._heard: dict[str, float] = {}
        """Time of the last message from each engine, or of the first request to it."""
        self._arriving: dict[BlockHashWithGroupId, ArrivingBlock] = {}
        self._epoch = 0
        """Epoch of the newest request."""
        self.link = LinkMeter()
        """Measures the transfer rate from other engines."""
        self._renewed_at = 0.0
        self._replies = msgspec.msgpack.Decoder(WorkerReplyMessage)
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def is_reading(self) -> bool:
        """Whether the result of a mover's read is pending."""
        return self._reader is not None and self._reader.is_busy

    def close(self) -> None:
        for socket in self._sources.values():
            socket.close()
        if self._reader is not None:
            self._reader.close(READER_CLOSE_S)

    # -- what the scheduler half wants -------------------------------------------------------------

    def ask(self, source: str, blocks: Sequence[SlotBlock]) -> None:
        """Requests blocks from the ranks of another engine, whose endpoints are `source`."""
        endpoints = split_endpoints(source)
        try:
            pieces = [
                self._heads.pieces(group, len(endpoints)) for group in range(len(self._slots))
            ]
        except ConfigError as error:
            logger.warning("cannot request KV blocks of %s: %s", source, error.message)
            self._note(not_fetched=[block.name for block in blocks])
            return
        until = time.monotonic() + self._addresses.timeout_s
        self._epoch += 1
        for block in blocks:
            heads = [piece.heads for piece in pieces[block.group]]
            self._arriving[block.name] = ArrivingBlock(block, until, heads)
        for rank, endpoint in enumerate(endpoints):
            heads_by_group = {
                group: piece.heads
                for group, head_pieces in enumerate(pieces)
                for piece in head_pieces
                if piece.rank == rank
            }
            missing = [
                block
                for block in blocks
                if block.group in heads_by_group and block.name in self._arriving
            ]
            if missing:
                self._ask_rank(endpoint, missing, heads_by_group)

    def _ask_rank(
        self, endpoint: str, blocks: Sequence[SlotBlock], heads: Mapping[int, Span]
    ) -> None:
        """Requests one rank's pieces of blocks."""
        if not any(endpoint in one.missing for one in self._arriving.values()):
            self._heard[endpoint] = time.monotonic()
        for block in blocks:
            piece = self._heads.get_piece_slice(block.group, heads[block.group])
            memory = self._slots[block.group][block.slot][piece]
            self._arriving[block.name].missing[endpoint] = ArrivingPiece(self._epoch, memory)
        wanted_blocks = [WantedBlock(block.group, block.key) for block in blocks]
        spans = [heads.get(group, NO_HEADS) for group in range(len(self._slots))]
        message = WantBlocks(
            self._addresses.fingerprint,
            wanted_blocks,
            self._addresses.timeout_s,
            self._epoch,
            spans,
        )
        self._send(endpoint, message)

    def cancel(self, names: Sequence[BlockHashWithGroupId]) -> None:
        """Cancels fetches that have not ended, here and at the other engine."""
        by_source: defaultdict[str, list[BlockHashWithGroupId]] = defaultdict(list)
        for name in dict.fromkeys(names):
            for source in self._arriving[name].missing if name in self._arriving else ():
                by_source[source].append(name)
        for source, dropped in by_source.items():
            self._send(source, DropBlocks(dropped))
        self._end([name for name in dict.fromkeys(names) if name in self._arriving])

    def _send(self, source: str, message: WorkerRequestMessage) -> None:
        try:
            self._socket_to(source).send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the message is lost; the peer's silence is detected later
        except zmq.ZMQError as error:
            self._lose(source, f"it cannot be reached: {error}")

    def _socket_to(self, source: str) -> zmq.Socket[bytes]:
        socket = self._sources.get(source)
        if socket is None:
            socket = self._sources[source] = self._context.socket(zmq.DEALER)
            self._poller.register(socket, zmq.POLLIN)
            lock_client(socket, self._addresses.secret)
            socket.connect(source)
        return socket

    # -- what comes --------------------------------------------------------------------------------

    def process_replies(self) -> None:
        """Processes messages of other engines."""
        for source, socket in list(self._sources.items()):
            while source in self._sources and socket.poll(0):
                self._take(source, socket.recv_multipart(copy=False))

    def _take(self, source: str, frames: Sequence[Any]) -> None:
        try:
            message = self._replies.decode(frames[0].buffer)
        except UNREADABLE as error:
            self._lose(source, f"it sent an invalid message: {error}")
            return
        self._heard[source] = time.monotonic()
        if isinstance(message, BlockPart | LayerPart):
            data = frames[1].buffer if len(frames) == 2 else b""
            self.link.note(source, len(data), self._heard[source], has_more=message.more)
            if isinstance(message, BlockPart):
                self._receive_part(source, message, data)
            else:
                self._receive_layer(source, message, data)
        elif isinstance(message, BlockAt):
            self._receive_offer(source, message)
        elif isinstance(message, NoBlocks):
            names = [name for name in message.names if self._answers(name, source, message.epoch)]
            self._end(names)
        elif isinstance(message, NotYours):
            self._lose(source, message.reason)

    def _answers(self, name: BlockHashWithGroupId, source: str, epoch: int) -> bool:
        """Returns whether a message replies to the request of a pending piece."""
        arriving = self._arriving.get(name)
        piece = None if arriving is None else arriving.missing.get(source)
        return piece is not None and piece.epoch == epoch

    def _piece(self, name: BlockHashWithGroupId, source: str) -> ArrivingPiece:
        return self._arriving[name].missing[source]

    def _receive_part(self, source: str, part: BlockPart, data: Any) -> None:
        """Writes a part of a block into its slot; a wrong size or damage ends the fetch."""
        if not self._answers(part.name, source, part.epoch):
            return
        is_whole = part.num_bytes == len(self._piece(part.name, source).memory)
        if not is_whole or get_checksum(data) != part.checksum:
            self._end_damaged(source, [part.name])
        else:
            self._write(source, part.name, part.offset, data)

    def _receive_layer(self, source: str, part: LayerPart, data: Any) -> None:
        """Writes one layer of some blocks into their slots; damage ends their fetches."""
        pending = {name for name in part.names if self._answers(name, source, part.epoch)}
        size, rest = divmod(len(data), max(1, len(part.names)))
        if rest or get_checksum(data) != part.checksum:
            self._end_damaged(source, sorted(pending))
            return
        for index, name in enumerate(part.names):
            if name in pending and self._answers(name, source, part.epoch):
                self._write(source, name, part.offset, data[index * size : (index + 1) * size])

    def _write(self, source: str, name: BlockHashWithGroupId, offset: int, data: Any) -> None:
        """Writes bytes of a piece; an offset outside of it ends the fetch."""
        piece, end = self._piece(name, source), offset + len(data)
        if piece.is_read or not 0 <= offset < end <= len(piece.memory):
            self._end_damaged(source, [name])
            return
        piece.memory[offset:end] = np.frombuffer(data, np.uint8)
        piece.cover.add(offset, end)
        if piece.cover.num_bytes == len(piece.memory):
            self._complete_piece(name, source)

    def _complete_piece(self, name: BlockHashWithGroupId, source: str) -> None:
        """Completes a piece, and its block if it is the last one."""
        arriving = self._arriving[name]
        del arriving.missing[source]
        if not arriving.missing:
            del self._arriving[name]
            block = arriving.block
            self._heads.join(block.group, self._slots[block.group][block.slot], arriving.heads)
            self._note(fetched=[name])

    def _end_damaged(self, source: str, names: Sequence[BlockHashWithGroupId]) -> None:
        logger.warning("KV blocks received from %s are damaged and are recomputed", source)
        self._end(names)

    def _receive_offer(self, source: str, offer: BlockAt) -> None:
        """Begins to read a block from another engine's memory into its slot; releases it if it is
        not wanted.
        """
        if not self._answers(offer.name, source, offer.epoch):
            self._send(source, ReleaseBlocks([offer.name], offer.epoch))
            return
        piece = self._piece(offer.name, source)
        if self._reader is None or offer.num_bytes != len(piece.memory):
            logger.warning("a KV block of %s has another transport and is recomputed", source)
            self._end([offer.name])
            self._send(source, ReleaseBlocks([offer.name], offer.epoch))
        elif not piece.is_read:
            piece.is_read = True
            name = PieceKey(offer.name, source)
            self._reader.read(
                OfferedPiece(name, offer.session, offer.address, offer.checksum, piece.memory)
            )

    def process_reads(self) -> None:
        """Reports finished reads, also to the engines whose memory was read."""
        if self._reader is None:
            return
        finished: defaultdict[tuple[str, int], list[BlockHashWithGroupId]] = defaultdict(list)
        self.link.add(*self._reader.pop_rate())
        for (name, source), has_come in self._reader.pop_finished():
            arriving = self._arriving[name]
            finished[source, arriving.missing[source].epoch].append(name)
            if has_come:
                self._heard[source] = time.monotonic()
            elif not arriving.is_dropped:
                logger.warning("a KV block could not be read completely and is recomputed")
            if has_come and not arriving.is_dropped:
                self._complete_piece(name, source)
            else:
                arriving.missing[source].is_read = False
                self._end([name])
        for (source, epoch), names in finished.items():
            if source in self._sources:
                self._send(source, ReleaseBlocks(names, epoch))

    def renew_leases(self) -> None:
        """Renews the leases of blocks that are still to be read."""
        leased: defaultdict[tuple[str, int], list[BlockHashWithGroupId]] = defaultdict(list)
        for name, arriving in self._arriving.items():
            for source, piece in arriving.missing.items():
                if piece.is_read and source in self._sources:
                    leased[source, piece.epoch].append(name)
        for (source, epoch), names in leased.items():
            self._send(source, HoldBlocks(names, epoch))

    # -- what does not come ------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Ends fetches that time out, and those from silent engines. An engine whose memory is
        being read may be silent; the mover detects if it ends.
        """
        self._end([name for name, one in self._arriving.items() if one.until <= now])
        missing = [item for one in self._arriving.values() for item in one.missing.items()]
        being_read = {source for source, piece in missing if piece.is_read}
        for source in {source for source, _ in missing} - being_read:
            if now - self._heard[source] > SILENCE_S:
                self._lose(source, f"it has not responded for {SILENCE_S:g} s")
        if now - self._renewed_at > RENEWAL_S:
            self._renewed_at = now
            self.renew_leases()

    def _lose(self, source: str, reason: str) -> None:
        """Ends all fetches from an engine; later requests to it are possible."""
        names = [name for name, one in self._arriving.items() if source in one.missing]
        logger.warning(
            "%d KV blocks of %s were not received and are recomputed: %s",
            len(names),
            source,
            reason,
        )
        socket = self._sources.pop(source, None)
        if socket is not None:
            self._poller.unregister(socket)
            socket.close()
        self._end(names)

    def _end(self, names: Sequence[BlockHashWithGroupId]) -> None:
        """Reports blocks that were not fetched. A slot that a mover writes to is freed when the
        mover has ended.
        """
        ended = []
        for name in names:
            arriving = self._arriving[name]
            reads = {source: piece for source, piece in arriving.missing.items() if piece.is_read}
            if not reads:
                del self._arriving[name]
                ended.append(name)
                continue
            assert self._reader is not None, "it reads"
            arriving.is_dropped, arriving.missing = True, reads
            for source in reads:
                self._reader.drop(PieceKey(name, source))
        if ended:
            self._note(not_fetched=ended)


class LinkMeter:
    """Sums of received bytes and of the time for receiving them.

    Each part of a block has a flag for whether the sender has queued another part. If so, the time
    until the next part counts as transfer time; otherwise the sender may have been waiting, and the
    time is not counted.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.seconds = 0.0
        self._before: dict[str, float] = {}
        """Arrival time of the last part from each source, if the source had queued another one."""

    def note(self, source: str, num_bytes: int, now: float, *, has_more: bool) -> None:
        """Records a part that arrived from a source at the time `now`."""
        before = self._before.pop(source, None)
        if before is not None:
            self.add(num_bytes, max(LEAST_GAP_S, now - before))
        if has_more:
            self._before[source] = now

    def add(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes += num_bytes
        self.seconds += seconds
