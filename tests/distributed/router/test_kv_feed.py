"""A router's view of a server's KV blocks follows the events, their replay and the snapshot."""

import asyncio
import json

import msgspec
import pytest
import zmq.asyncio

from octavo.distributed.router.kv_feed import KvFeed, resolve_endpoint
from octavo.engine.protocol.block_events import BlocksCleared, BlocksRemoved, BlocksStored
from octavo.engine.protocol.block_hashes import BlockHashing
from octavo.engine.protocol.cached_hashes import CachedHashes
from octavo.engine.protocol.kv_events import parse_events_config
from octavo.frontend.kv_event_publisher import KVEventPublisher
from octavo.utils.secure_sockets import lock_client, lock_server
from tests.support.free_ports import free_port

BLOCK = 4
ROOT = BlockHashing().root()


def chain(first):
    tokens = list(range(first, first + 4 * BLOCK))
    return BlocksStored(BlockHashing().digests(tokens, BLOCK), ROOT, tokens)


def names(*events):
    return [digest[-8:] for event in events for digest in event.digests]


class Feed:
    """A feed beside publishers that come and go at one address, and a relay that may be cut, or
    left out.
    """

    is_cut = False

    def __init__(self, *, is_direct=False, **fields):
        self.is_direct = is_direct
        ends = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint")}
        text = json.dumps({"enable_kv_cache_events": True} | ends | fields)
        self.config = parse_events_config(text)
        self.cached = CachedHashes()
        self.publisher = self.publish()

    def publish(self):
        self.publisher = KVEventPublisher(self.config, engine=0, root=ROOT, block_size=BLOCK)
        return self.publisher

    async def __aenter__(self):
        self.context = zmq.asyncio.Context()
        self.source, self.relay = self.context.socket(zmq.SUB), self.context.socket(zmq.PUB)
        lock_client(self.source, self.config.secret)
        lock_server(self.relay, self.config.secret)
        self.source.subscribe("")
        self.source.connect(self.config.endpoint)
        relayed = f"tcp://127.0.0.1:{free_port()}"
        self.relay.bind(relayed)
        if self.is_direct:
            relayed = self.config.endpoint
        feed = KvFeed(self.cached, self.context, self.config.secret)
        replay, topic = self.config.replay_endpoint, self.config.topic
        self.tasks = [
            asyncio.create_task(feed.run(relayed, replay, topic)),
            asyncio.create_task(self.pass_on()),
        ]
        return self

    async def pass_on(self):
        while True:
            message = await self.source.recv_multipart()
            if not self.is_cut:
                await self.relay.send_multipart(message)

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert not len(self.cached), "what nothing tells of any more is not counted on"
        self.publisher.close()
        self.context.destroy(linger=0)

    async def knows(self, wanted):
        async with asyncio.timeout(10):
            while not (len(self.cached) == len(wanted) and self.cached.num_known(wanted)):
                if not wanted and not len(self.cached):
                    return
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("secret", [None, "a secret"])
def test_a_feed_knows_what_is_stored_before_and_after_it_begins(secret):
    async def main():
        feed = Feed(**({"secret": secret} if secret else {}))
        first, second = chain(0), chain(100)
        feed.publisher.publish([first])
        async with feed:
            await feed.knows(names(first))
            feed.publisher.publish([second])
            await feed.knows(names(first, second))
            feed.publisher.publish([BlocksRemoved(first.digests)])
            await feed.knows(names(second))
            feed.publisher.publish([BlocksCleared()])
            await feed.knows([])

    asyncio.run(main())


@pytest.mark.parametrize("buffer_steps", [100, 1], ids=["replay", "snapshot"])
def test_missed_batches_are_made_up_for(buffer_steps):
    async def main():
        feed = Feed(buffer_steps=buffer_steps)
        chains = [chain(100 * number) for number in range(4)]
        async with feed:
            feed.publisher.publish([chains[0]])
            await feed.knows(names(chains[0]))
            await asyncio.sleep(0.3)  # for the snapshot at the beginning, which may come after it
            feed.is_cut = True
            feed.publisher.publish([chains[1]])
            feed.publisher.publish([BlocksRemoved(chains[0].digests), chains[2]])
            await asyncio.sleep(0.05)
            assert len(feed.cached) == 4, "nothing has come"
            feed.is_cut = False
            feed.publisher.publish([chains[3]])
            await feed.knows(names(*chains[1:]))

    asyncio.run(main())


def test_a_restarted_engine_is_known_by_what_it_has_now():
    async def main():
        feed = Feed()
        async with feed:
            for number in range(3):
                feed.publisher.publish([chain(100 * number)])
            await feed.knows(names(*(chain(100 * number) for number in range(3))))
            await asyncio.to_thread(feed.publisher.close)
            feed.publish()
            async with asyncio.timeout(10):
                while len(feed.cached) != 4:
                    feed.publisher.publish([BlocksCleared(), chain(900)])
                    await asyncio.sleep(0.05)
            assert feed.cached.num_known(names(chain(900))) == 4

    asyncio.run(main())


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no replay"])
def test_an_engine_that_restarts_and_says_nothing_is_known_by_what_it_has(replay):
    """The new one has published as much as the old one before the router meets it."""

    async def main():
        feed = Feed(is_direct=True, **({} if replay else {"replay_endpoint": None}))
        async with feed:
            while not len(feed.cached):
                feed.publisher.publish([chain(0)])
                await asyncio.sleep(0.02)
            await asyncio.to_thread(feed.publisher.close)
            feed.publish()
            for number in range(200):
                feed.publisher.publish([BlocksCleared(), chain(900)] if number == 150 else [])
            if replay:
                await feed.knows(names(chain(900)))
            async with asyncio.timeout(10):
                while feed.cached.num_known(names(chain(950))) < 4:
                    feed.publisher.publish([chain(950)])
                    await asyncio.sleep(0.02)
            assert not feed.cached.num_known(names(chain(0)))

    asyncio.run(main())


def test_missed_batches_of_another_epoch_are_none():
    """Nothing tells that the engine is another one but its epoch: its numbers go on."""

    async def main():
        feed = Feed()
        async with feed:
            feed.publisher.publish([chain(0)])
            await feed.knows(names(chain(0)))
            feed.is_cut = True
            await asyncio.to_thread(feed.publisher.close)
            feed.publish()
            for number in range(1, 5):
                feed.publisher.publish([chain(100 * number)])
            await asyncio.sleep(0.5)  # until the relay has met the new one
            feed.is_cut = False
            while feed.cached.num_known(names(chain(900))) < 4:
                feed.publisher.publish([chain(900)])
                await asyncio.sleep(0.05)
            await feed.knows(names(*(chain(100 * number) for number in (1, 2, 3, 4, 9))))

    asyncio.run(main())


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x91\x81\xa4type\xa2\xff\xfe\x00",
        b"\x91" * 100_000,
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": [-1]}], 0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": ["x"]}], 0]),
    ],
    ids=["nothing", "no msgpack", "no text", "deep", "negative", "text"],
)
def test_a_batch_that_cannot_be_read_ends_no_feed(payload):
    async def main():
        feed = Feed()
        async with feed:
            feed.publisher.publish([chain(0)])
            await feed.knows(names(chain(0)))
            number = (1).to_bytes(8, "big")
            for message in ([b"", number, payload], [b"", b"", payload], [b"alone"]):
                await feed.relay.send_multipart(message)
            while feed.cached.num_known(names(chain(100))) < 4:
                feed.publisher.publish([chain(100)])
                await asyncio.sleep(0.02)

    asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["nowhere", "tcp://127.0.0.1"])
def test_an_address_that_is_none_is_told(endpoint, caplog):
    async def main():
        with zmq.asyncio.Context() as context:
            await KvFeed(CachedHashes(), context, None).run(endpoint, None, "")

    asyncio.run(main())
    assert f"cannot subscribe to KV events at {endpoint}" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://127.0.0.1:5", "far", "tcp://127.0.0.1:5"),
        ("tcp://0.0.0.0:5", "far", "tcp://far:5"),
        ("tcp://[::]:5", "fe80::1", "tcp://[fe80::1]:5"),
        ("ipc:///tmp/x", "far", "ipc:///tmp/x"),
    ],
)
def test_an_address_of_all_interfaces_gets_its_machines_name(endpoint, host, expected):
    assert resolve_endpoint(endpoint, host) == expected
