"""Publishes the KV events of one engine over ZeroMQ, as vLLM does: a PUB socket for (topic,
sequence, batch), and a ROUTER socket that replays missed batches.

A thread owns the sockets and sleeps while there are no events. It keeps the last batches for
replay, and the set of stored blocks for a snapshot if the missed batches are too old to replay.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from octavo.api.errors import ConfigError
from octavo.engine.protocol.block_events import (
    BlockEvent,
    BlockEventLog,
    BlocksCleared,
    BlocksStored,
)
from octavo.engine.protocol.kv_events import (
    END,
    SNAPSHOT,
    KVEventBatch,
    KVEventsConfig,
    offset_endpoint,
    wire_event,
)
from octavo.utils.secure_sockets import lock_server

WAITING = "inproc://kv-events"
NUMBER_BYTES = 8
EPOCH_BYTES = 16


class StoredBlocks:
    """Blocks that subscribers know to be stored, from which a snapshot is built."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        """Parent and tokens of each block by digest, in the order in which they were stored."""

    def apply(self, event: BlockEvent) -> None:
        if isinstance(event, BlocksStored):
            parent, size = event.parent, self._block_size
            for index, digest in enumerate(event.digests):
                tokens = tuple(event.token_ids[index * size : (index + 1) * size])
                self._blocks.pop(digest, None)
                self._blocks[digest] = parent, tokens
                parent = digest
        elif isinstance(event, BlocksCleared):
            self._blocks.clear()
        else:
            for digest in event.digests:
                self._blocks.pop(digest, None)

    def events(self) -> Sequence[BlockEvent]:
        """Returns events for all blocks; consecutive blocks of a chain share one event."""
        log = BlockEventLog()
        log.cleared()
        for digest, (parent, tokens) in self._blocks.items():
            log.stored(digest, parent, tokens)
        return log.pop_events()


class KVEventPublisher:
    """Publisher of one engine's events. `publish` and `close` are thread-safe."""

    def __init__(
        self, config: KVEventsConfig, *, engine: int, root: bytes, block_size: int
    ) -> None:
        """Binds the endpoints of engine number `engine`; raises ConfigError if one is in use."""
        self._engine = engine
        self._root = root
        self._block_size = block_size
        self._topic = config.topic.encode()
        self._next = 0
        """Sequence number of the next batch."""
        self._encoder = msgspec.msgpack.Encoder()
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._stored = StoredBlocks(block_size)
        self._epoch = secrets.token_bytes(EPOCH_BYTES)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._closed = False
        try:
            self._waiting = self._context.socket(zmq.PULL)
            self._waiting.bind(WAITING)
            self._events = self._bound(zmq.PUB, config, "endpoint")
            self._requests = self._bound(zmq.ROUTER, config, "replay_endpoint")
            self._inbox = self._context.socket(zmq.PUSH)
            self._inbox.sndhwm = 0
            self._inbox.connect(WAITING)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="octavo-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Publishes the events of a step as one batch. BlocksCleared begins a new epoch."""
        with self._lock:
            if self._closed:
                return
            for event in events:
                self._stored.apply(event)
                if isinstance(event, BlocksCleared):
                    self._epoch = secrets.token_bytes(EPOCH_BYTES)
            number, payload = self._next, self._encode(events)
            self._next += 1
            self._batches.append((number, payload))
            self._inbox.send_multipart([number.to_bytes(8, "big"), payload])

    def close(self) -> None:
        """Sends queued batches and ends the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.send(b"")
        self._thread.join()
        self._context.destroy(linger=100)

    def _bound(self, kind: int, config: KVEventsConfig, name: str) -> Any:
        """Returns a socket bound to the endpoint in a config field. Returns None if the field is
        empty.
        """
        address = getattr(config, name)
        if address is None:
            return None
        socket = self._context.socket(kind)
        lock_server(socket, config.secret)
        socket.set_hwm(config.hwm)
        address = offset_endpoint(address, self._engine)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {name}: cannot listen on {address}: {error.strerror}",
                hint="choose a free port",
            ) from None
        return socket

    def _encode(self, events: Sequence[BlockEvent]) -> bytes:
        wire = [wire_event(event, self._root, self._block_size) for event in events]
        return self._encoder.encode(KVEventBatch(time.time(), wire, self._engine))

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._waiting, self._requests):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._waiting in ready:
                message = self._waiting.recv_multipart()
                if len(message) == 1:
                    return
                self._events.send_multipart([self._topic, *message])
            if self._requests in ready:
                with contextlib.suppress(zmq.ZMQError):  # the requester has disconnected
                    self._answer(self._requests.recv_multipart())

    def _answer(self, request: list[bytes]) -> None:
        """Replies to a request from a REQ or DEALER socket: the first requested sequence number,
        alone or with its epoch, or SNAPSHOT. Any other request, or another epoch, gets only the end
        marker.
        """
        requester, query = request[:-1], request[-1]
        answers: list[tuple[int, bytes]] = []
        with self._lock:
            epoch = self._epoch
            if query == SNAPSHOT:
                # The snapshot covers all batches below this number.
                answers = [(self._next, self._encode(self._stored.events()))]
            elif len(query) == NUMBER_BYTES or query[NUMBER_BYTES:] == epoch:
                first = int.from_bytes(query[:NUMBER_BYTES], "big")
                answers = [one for one in self._batches if one[0] >= first]
        for number, batch in answers:
            self._requests.send_multipart([*requester, number.to_bytes(NUMBER_BYTES, "big"), batch])
        has_epoch = query == SNAPSHOT or len(query) == NUMBER_BYTES + EPOCH_BYTES
        self._requests.send_multipart([*requester, END, epoch if has_epoch else b""])
