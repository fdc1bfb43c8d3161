"""Follows the KV events of a server, and tracks which blocks it has cached.

Each engine numbers its batches. Missed batches are replayed. A snapshot is read if missed batches
are too old, after a restart of the engine, and at each new connection. Source of the format: vLLM's
KV events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec
import zmq
import zmq.asyncio

from octavo.distributed.router.members import KvEventsCard, Member
from octavo.distributed.transfer.messages import UNREADABLE
from octavo.engine.protocol.cached_hashes import CachedHashes
from octavo.engine.protocol.kv_events import (
    END,
    HASH_BYTES,
    SNAPSHOT,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from octavo.utils.secure_sockets import lock_client

REPLAY_TIMEOUT_S = 5.0
"""Timeout of a replay, in seconds."""
WATCH_INTERVAL_S = 0.5
"""Interval at which a server's capabilities are checked, in seconds."""
ANY_HOSTS = ("0.0.0.0", "*", "[::]", "::")

logger = logging.getLogger(__name__)

Batch = tuple[int, bytes]


class KvFeed:
    """Subscriber to the events of one engine, which updates the cached block hashes of its
    server.
    """

    def __init__(
        self, cached: CachedHashes, context: zmq.asyncio.Context, secret: str | None
    ) -> None:
        self._cached = cached
        self._context = context
        self._secret = secret
        self._held: set[bytes] = set()
        """Block hashes of this engine; cleared together with its cache."""
        self._next: int | None = None
        """Number of the next batch; None before the first."""
        self._epoch = b""
        """Epoch of the engine at its last snapshot."""
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    async def run(self, endpoint: str, replay: str | None, topic: str) -> None:
        """Follows the events until it is cancelled."""
        events = self._context.socket(zmq.SUB)
        lock_client(events, self._secret)
        events.set_hwm(0)
        events.subscribe(topic)
        met = events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        poller = zmq.asyncio.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(met, zmq.POLLIN)
        try:
            events.connect(endpoint)
            while True:
                ready = dict(await poller.poll())
                if met in ready:
                    await met.recv_multipart()
                    await self._resync(replay)
                if events in ready:
                    message = await events.recv_multipart()
                    if len(message) == 3 and message[0] == topic.encode():
                        await self._process_batch(message[1], message[2], replay)
        except zmq.ZMQError as error:
            logger.warning("cannot subscribe to KV events at %s: %s", endpoint, error)
        finally:
            events.disable_monitor()
            events.close()
            self._clear()

    async def _resync(self, replay: str | None) -> None:
        """Reads the current blocks after a connection was established, because the address may now
        belong to another engine.
        """
        self._next = None
        if replay is not None:
            await self._recover(replay)
        else:
            self._clear()

    async def _process_batch(self, number: bytes, payload: bytes, replay: str | None) -> None:
        """Applies a batch; after a gap, missed batches are requested first."""
        index = int.from_bytes(number, "big")
        if self._next is not None and index != self._next:
            if index < self._next and replay is not None:
                self._next = None  # the engine has restarted, or the snapshot had this batch
                await self._recover(replay)
                if self._next is not None and index < self._next:
                    return
            elif replay is not None:
                await self._catch_up(index, replay)
            else:
                self._clear()
                self._next = None
        if self._next is None or index >= self._next:
            self._take(payload)
            self._next = index + 1

    async def _catch_up(self, index: int, replay: str) -> None:
        """Applies the batches before number `index`, or a snapshot if they are no longer
        available.
        """
        assert self._next is not None, "a gap has a beginning"
        answers = await self._request_batches(replay, self._next.to_bytes(8, "big") + self._epoch)
        if answers and answers[0][0] == self._next:
            for number, payload in answers:
                if number < index:
                    self._take(payload)
                    self._next = number + 1
            return
        await self._recover(replay)

    async def _recover(self, replay: str) -> None:
        """Applies a snapshot; without a reply, no blocks are known."""
        answers = await self._request_batches(replay, SNAPSHOT)
        self._clear()
        if answers:
            number, payload = answers[0]
            self._take(payload)
            self._next = number

    async def _request_batches(self, replay: str, query: bytes) -> list[Batch]:
        """Returns the numbered batches of a reply and stores its epoch; returns [] after a
        timeout.
        """
        socket = self._context.socket(zmq.DEALER)
        lock_client(socket, self._secret)
        batches: list[Batch] = []
        try:
            socket.connect(replay)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", query])
                while True:
                    _, number, payload = await socket.recv_multipart()
                    if number == END:
                        self._epoch = payload or self._epoch
                        return batches
                    batches.append((int.from_bytes(number, "big"), payload))
        except (TimeoutError, ValueError, zmq.ZMQError):
            return []
        finally:
            socket.close()

    def _take(self, payload: bytes) -> None:
        try:
            batch = self._decoder.decode(payload)
        except UNREADABLE as error:
            logger.warning("cannot parse a batch of KV events: %s", error)
            self._clear()
            return
        for event in batch.events:
            if isinstance(event, BlockStored):
                names = _names(event.block_hashes)
                self._held.update(names)
                self._cached.add(names)
            elif isinstance(event, BlockRemoved):
                names = _names(event.block_hashes)
                self._held.difference_update(names)
                self._cached.remove(names)
            else:
                self._clear()

    def _clear(self) -> None:
        self._cached.remove(self._held)
        self._held.clear()


class MemberFeeds:
    """Feeds of one server, one for each of its engines."""

    def __init__(self, member: Member, context: zmq.asyncio.Context, secret: str | None) -> None:
        self._member = member
        self._context = context
        self._secret = secret

    async def run(self) -> None:
        """Follows the server's events, whenever it publishes any, until cancelled."""
        while True:
            card = self._member.capabilities.kv_events
            if card is None:
                await asyncio.sleep(WATCH_INTERVAL_S)
            else:
                await self._follow(card)

    async def _follow(self, card: KvEventsCard) -> None:
        """Follows all engines of a card until the server shows a different card."""
        if card.is_locked and self._secret is None:
            logger.warning(
                "KV events of %s require a secret: set --kv-events-secret",
                self._member.url,
            )
            await self._while_current(card)
            return
        replays: list[str | None] = [*card.replay_endpoints] or [None] * len(card.endpoints)
        host = self._member.client.host
        tasks = [
            asyncio.ensure_future(
                KvFeed(self._member.target.cached, self._context, self._secret).run(
                    resolve_endpoint(endpoint, host),
                    replay and resolve_endpoint(replay, host),
                    card.topic,
                )
            )
            for endpoint, replay in zip(card.endpoints, replays, strict=False)
        ]
        try:
            await self._while_current(card)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _while_current(self, card: KvEventsCard) -> None:
        while self._member.capabilities.kv_events is card:
            await asyncio.sleep(WATCH_INTERVAL_S)


def resolve_endpoint(endpoint: str, host: str) -> str:
    """Returns the address at which the router reaches a server's endpoint: a wildcard address is
    replaced by the server's host.
    """
    if not endpoint.startswith("tcp://"):
        return endpoint
    bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if bound not in ANY_HOSTS:
        return endpoint
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _names(hashes: list[int]) -> list[bytes]:
    return [(one % (1 << 8 * HASH_BYTES)).to_bytes(HASH_BYTES, "big") for one in hashes]
