"""Sender of a transfer channel: serves other engines' requests from a `SendBuffer`, leases memory
that a mover reads, and sends the layers of blocks that are being computed.

A peer requests blocks by hash, often before they are computed, and waits. A peer requests all heads
of this rank, or a piece of them. A piece is copied when it is sent, and always sent in messages.
Used by the thread of `transfer_worker.py`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from octavo.api.errors import ConfigError
from octavo.distributed.transfer.address import TransferAddresses
from octavo.distributed.transfer.block_transport import BlockTransport
from octavo.distributed.transfer.kv_head_partition import KVHeadPartition
from octavo.distributed.transfer.layer_stream import LayerStream, StreamedGroup
from octavo.distributed.transfer.messages import (
    PART_BYTES,
    UNREADABLE,
    BlockAt,
    BlockPart,
    DropBlocks,
    HoldBlocks,
    KeepAlive,
    LayerPart,
    NoBlocks,
    NotYours,
    ReleaseBlocks,
    WantBlocks,
    WorkerRequestMessage,
)
from octavo.distributed.transfer.send_buffer import Ask, BlockData, SendBuffer
from octavo.distributed.transfer.transfer_status import BUSY_MS, IDLE_MS, ReportBlocks
from octavo.engine.protocol.kv_messages import BlockHashWithGroupId, SlotBlock
from octavo.utils.secure_sockets import lock_server
from octavo.worker.kv_connectors.checksum import get_checksum

logger = logging.getLogger(__name__)

PARTS_IN_TURN = 16
"""Number of messages sent to one peer before the next peer's turn."""


@dataclass(frozen=True, slots=True)
class LeavingPart:
    """A part of a block to send, from `offset` on."""

    name: BlockHashWithGroupId
    data: BlockData
    offset: int
    epoch: int

    def frames(self, *, more: bool) -> tuple[BlockPart, Any]:
        """Returns the message and its bytes; `more` means that another one follows."""
        part = _view(self.data)[self.offset : self.offset + PART_BYTES]
        size, checksum = len(self.data), get_checksum(part)
        return BlockPart(self.name, size, self.offset, checksum, self.epoch, more), part


@dataclass(frozen=True, slots=True)
class LeavingPiece:
    """Some heads of a block, to be copied and sent."""

    name: BlockHashWithGroupId
    data: bytes | None
    """Bytes of the block; None if they are in the send buffer, which may evict them."""
    ask: Ask


@dataclass(frozen=True, slots=True)
class LeavingLayers:
    """One layer of some blocks to send."""

    names: list[BlockHashWithGroupId]
    data: NDArray[np.uint8]
    """Bytes, `[blocks, layer_bytes]`."""
    offset: int
    """Offset of the layer's bytes in a block."""
    epoch: int

    def frames(self, *, more: bool) -> tuple[LayerPart, Any]:
        """Returns the message and its bytes; `more` means that another one follows."""
        data = self.data.reshape(-1).data
        return LayerPart(self.names, self.offset, get_checksum(data), self.epoch, more), data


Leaving = LeavingPart | LeavingLayers | bytes


class BlockSender:
    """The socket for other engines' requests, and the messages queued for it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        slots: Sequence[NDArray[np.uint8]],
        addresses: TransferAddresses,
        note: ReportBlocks,
        *,
        mover: BlockTransport | None,
        heads: KVHeadPartition,
    ) -> None:
        self._slots = slots
        self._heads = heads
        self._addresses = addresses
        self._note = note
        self._mover = mover
        self._arena = None if mover is None else _make_arena(mover, slots, addresses)
        self.send_buffer = SendBuffer(addresses.max_bytes, self._release)
        self.socket = (
            None
            if addresses.listen is None
            else _listen(context, addresses.listen, addresses.secret)
        )
        """Socket for requests; None if this engine only fetches."""
        self._leaving: defaultdict[bytes, deque[Leaving | LeavingPiece]] = defaultdict(deque)
        """Messages queued for each peer."""
        self._stream: LayerStream | None = None
        """Blocks that are being computed."""
        self._num_sent: dict[tuple[Ask, BlockHashWithGroupId], int] = {}
        """Number of layers sent so far, for each request for the stream's blocks."""
        self._streamed: set[BlockHashWithGroupId] = set()
        """Blocks that were sent layer by layer; kept until they are buffered or their prompt has
        finished.
        """
        self._requests = msgspec.msgpack.Decoder(WorkerRequestMessage)
        self._encode = msgspec.msgpack.Encoder().encode

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()

    def _release(self, data: BlockData) -> None:
        if self._arena is not None:
            assert not isinstance(data, bytes)
            self._arena.release(data)

    # -- what the scheduler half wants -------------------------------------------------------------

    def keep(self, block: SlotBlock) -> None:
        """Buffers a block and sends it to waiting peers."""
        now, slot = time.monotonic(), self._slots[block.group][block.slot]
        gone = self.send_buffer.make_room(len(slot), now)
        buffer = slot.tobytes() if self._arena is None else self._arena.put(slot)
        has_room = (
            buffer is not None and self.send_buffer.put(block.name, block.key, buffer, now)[0]
        )
        self._note(gone=gone, **{"kept" if has_room else "not_kept": [block.name]})
        if buffer is not None and not has_room:
            self._release(buffer)
        data = buffer if buffer is not None and has_room else slot.tobytes()
        asks = self.send_buffer.waiting(block.name)
        was_streamed = block.name in self._streamed
        self._streamed.discard(block.name)
        if (asks or was_streamed) and has_room:
            self.send_buffer.take(block.name, block.key)
        for ask in asks:
            self.send_block(ask, block.name, data)

    def tell_absent(self, names: Iterable[BlockHashWithGroupId]) -> None:
        """Notifies waiting peers that blocks will not be available."""
        absent: defaultdict[Ask, list[BlockHashWithGroupId]] = defaultdict(list)
        for name in names:
            self._streamed.discard(name)
            for ask in self.send_buffer.ended(name, time.monotonic()):
                absent[ask].append(name)
        for ask, missing in absent.items():
            self._leaving[ask.peer].append(self._encode(NoBlocks(missing, ask.epoch)))

    # -- layers of blocks that are being computed --------------------------------------------------

    def stream(self, stream: LayerStream) -> None:
        """Sends the layers of blocks to waiting peers while they are written."""
        self.send_layers()
        self._stream = stream
        self._num_sent.clear()

    def send_layers(self) -> None:
        """Queues the layers that have been written since the last call."""
        stream = self._stream
        if stream is None:
            return
        is_last = stream.is_over  # no more layers will be copied after that
        stream.copy_written()
        for group in stream.groups.values():
            self._send_group(group, len(group.layers))
        if is_last:
            self._stream = None

    def _send_group(self, group: StreamedGroup, num_layers: int) -> None:
        """Queues the first `num_layers` copied layers of a group for each request that waits for
        its blocks, except those already sent.
        """
        waiting: defaultdict[tuple[Ask, int], list[int]] = defaultdict(list)
        for index, block in enumerate(group.blocks):
            for ask in self.send_buffer.asks(block.name):
                waiting[ask, self._num_sent.get((ask, block.name), 0)].append(index)
        for (ask, first), indices in waiting.items():
            names = [group.blocks[index].name for index in indices]
            for layer in group.layers[first:num_layers]:
                self.send_layer(ask, names, layer.offset, layer.data[indices])
            self._num_sent |= dict.fromkeys([(ask, name) for name in names], num_layers)
            if num_layers == group.num_layers:
                self._streamed.update(names)
                self.send_buffer.served(ask, names)

    def send_layer(
        self, ask: Ask, names: Sequence[BlockHashWithGroupId], offset: int, data: NDArray[np.uint8]
    ) -> None:
        """Sends one layer of blocks of a group, `[blocks, layer_bytes]`, at `offset` of each block,
        in messages of the maximum size.
        """
        group = names[0].group
        if not self._heads.is_whole(group, ask.heads[group]):
            data, offset = self._heads.cut_layer(group, data, offset, ask.heads[group])
        in_one = max(1, PART_BYTES // data.shape[1])
        for first in range(0, len(names), in_one):
            some = slice(first, first + in_one)
            message = LeavingLayers(list(names[some]), data[some], offset, ask.epoch)
            self._leaving[ask.peer].append(message)

    # -- messages ----------------------------------------------------------------------------------

    def process_requests(self) -> None:
        """Processes requests of other engines."""
        while self.socket is not None and self.socket.poll(0):
            self._take(self.socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        try:
            message = self._requests.decode(rest[0] if len(rest) == 1 else b"")
        except UNREADABLE as error:
            self._leaving[peer].append(self._encode(NotYours(f"not understood: {error}")))
            return
        if isinstance(message, DropBlocks):
            self.send_buffer.drop(peer, message.names)
        elif isinstance(message, HoldBlocks):
            self.send_buffer.renew(Ask(peer, message.epoch), message.names, time.monotonic())
        elif isinstance(message, ReleaseBlocks):
            self.send_buffer.end_leases(Ask(peer, message.epoch), message.names)
        elif reason := self._get_rejection(message):
            self._leaving[peer].append(self._encode(NotYours(reason)))
        else:
            self._answer(peer, message)

    def _get_rejection(self, message: WantBlocks) -> str:
        """Returns the reason for rejecting a peer; "" if it is accepted."""
        if message.fingerprint != self._addresses.fingerprint:
            return "this engine's blocks have other bytes: model, options or versions differ"
        if len(message.heads) != len(self._heads.groups):
            return f"got heads of {len(message.heads)} cache groups, not {len(self._heads.groups)}"
        for group in {block.group for block in message.blocks} & set(range(len(message.heads))):
            heads = message.heads[group]
            if not self._heads.has(group, heads):
                first, last = self._heads.span(group)
                given_heads = f"got the KV heads {heads[0]} to {heads[1]} of cache group {group}"
                return f"{given_heads}, this rank has {first} to {last}"
        return ""

    def _answer(self, peer: bytes, message: WantBlocks) -> None:
        coming = []
        refused = []
        now = time.monotonic()
        ask = Ask(peer, message.epoch, tuple(message.heads))
        for block in message.blocks:
            data = self.send_buffer.take(block.name, block.key)
            if data is not None:
                self.send_block(ask, block.name, data)
            elif self.send_buffer.is_absent(block.name, now):
                refused.append(block.name)
            else:
                coming.append(block)
        wait_s = min(max(0.0, message.wait_s), self._addresses.timeout_s)
        refused += self.send_buffer.wait(ask, coming, now + wait_s)
        if refused:
            self._leaving[peer].append(self._encode(NoBlocks(refused, ask.epoch)))

    def send_block(self, ask: Ask, name: BlockHashWithGroupId, data: BlockData) -> None:
        """Sends a block's bytes, or leases the memory that the peer reads."""
        messages = self._leaving[ask.peer]
        if not self._heads.is_whole(name.group, ask.heads[name.group]):
            own = data if isinstance(data, bytes) else None
            if own is None:
                self.send_buffer.lend(name, ask, time.monotonic())
            messages.append(LeavingPiece(name, own, ask))
            return
        if self._mover is not None and not isinstance(data, bytes):
            checksum = self.send_buffer.lend(name, ask, time.monotonic())
            session, address = self._mover.session, data.ctypes.data
            offer = BlockAt(name, session, address, len(data), checksum, ask.epoch)
            messages.append(self._encode(offer))
            return
        messages.extend(_split(name, data, ask))

    def _first(self, messages: deque[Leaving | LeavingPiece]) -> Leaving:
        """Returns the first message; a piece is split into its messages first."""
        first = messages[0]
        if not isinstance(first, LeavingPiece):
            return first
        messages.popleft()
        parts = self._cut(first)
        messages.extendleft(reversed(parts))
        return parts[0]

    def _cut(self, piece: LeavingPiece) -> list[Leaving]:
        """Returns the messages of a piece, or a message that the block is absent if it was
        evicted.
        """
        name, ask = piece.name, piece.ask
        data = self.send_buffer.peek(name) if piece.data is None else piece.data
        self.send_buffer.end_leases(ask, [name])
        if data is None:
            return [self._encode(NoBlocks([name], ask.epoch))]
        cut = self._heads.cut(name.group, np.frombuffer(data, np.uint8), ask.heads[name.group])
        return list(_split(name, cut, ask))

    def sign(self, now: float) -> None:
        """Ends waits that timed out, and sends keep-alives to the other peers."""
        self.send_buffer.expire(now)
        for peer in self.send_buffer.waiting_peers:
            self._leaving[peer].append(self._encode(KeepAlive()))

    def _frames(self, peer: bytes, message: Leaving) -> list[Any]:
        if isinstance(message, bytes):
            return [peer, message]
        head, data = message.frames(more=len(self._leaving[peer]) > 1)
        return [peer, self._encode(head), data]

    def send_leaving(self) -> int:
        """Sends queued messages, a few of each peer in turn, as long as sockets accept them.
        Returns the milliseconds until there may be more to send.
        """
        pause_ms = IDLE_MS if self._stream is None else BUSY_MS
        for peer, messages in list(self._leaving.items()):
            try:
                for _ in range(min(PARTS_IN_TURN, len(messages))):
                    assert self.socket is not None
                    frames = self._frames(peer, self._first(messages))
                    self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                    messages.popleft()
                if messages:
                    pause_ms = 0
                    continue
            except zmq.Again:
                pause_ms = min(pause_ms, BUSY_MS)
                continue
            except zmq.ZMQError as error:
                logger.info("a peer that was fetching KV blocks is gone: %s", error)
            del self._leaving[peer]
        return pause_ms


def _listen(
    context: zmq.Context[zmq.Socket[bytes]], address: str, secret: str | None
) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    lock_server(router, secret)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        router.close()
        raise ConfigError(
            f"kv_transfer_address: cannot listen on {address}, the next port: {error}",
            hint="use an address of this machine and a free port, with free ports above it",
        ) from error
    return router


def _split(name: BlockHashWithGroupId, data: BlockData, ask: Ask) -> Iterator[LeavingPart]:
    """Yields the messages of a block, or of a piece of one."""
    for offset in range(0, len(data), PART_BYTES):
        yield LeavingPart(name, data, offset, ask.epoch)


def _view(data: BlockData) -> memoryview:
    return memoryview(data) if isinstance(data, bytes) else data.data


def _make_arena(
    mover: BlockTransport, slots: Sequence[NDArray[np.uint8]], addresses: TransferAddresses
) -> BlockArena | None:
    """Registers the slots and the memory from which other engines read blocks. Returns None if
    blocks are sent in messages.
    """
    for group in slots:
        mover.register(group.reshape(-1))
    if addresses.listen is None:
        return None
    arena = BlockArena(addresses.max_bytes, max(group.shape[1] for group in slots))
    mover.register(arena.memory)
    return arena


class BlockArena:
    """Buffers of `buffer_bytes` bytes each, in one array."""

    def __init__(self, num_bytes: int, buffer_bytes: int) -> None:
        num_buffers = max(1, num_bytes // buffer_bytes)
        self.memory: NDArray[np.uint8] = np.empty(num_buffers * buffer_bytes, np.uint8)
        """The array of all buffers; pages use no memory until they are written."""
        self._buffer_bytes = buffer_bytes
        self._free = list(range(num_buffers - 1, -1, -1))

    def put(self, data: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """Copies bytes into a free buffer and returns the copy; None if none is free."""
        assert len(data) <= self._buffer_bytes, "a block that is larger than a buffer"
        if not self._free:
            return None
        first = self._free.pop() * self._buffer_bytes
        buffer = self.memory[first : first + len(data)]
        buffer[:] = data
        return buffer

    def release(self, buffer: NDArray[np.uint8]) -> None:
        """Frees a slot; its bytes may be overwritten from now on."""
        offset = buffer.ctypes.data - self.memory.ctypes.data
        self._free.append(offset // self._buffer_bytes)
