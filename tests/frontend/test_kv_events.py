"""KV events in vLLM's form: read here by a plain ZeroMQ subscriber with the structs that vLLM and
its router define.
"""

import json
import random

import msgspec
import pytest
import zmq

from octavo.api.errors import ConfigError
from octavo.engine.protocol.block_events import (
    BlockEventLog,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
)
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing
from octavo.engine.protocol.kv_events import get_hash, parse_events_config
from octavo.engine.protocol.requests import ResetPrefixCache
from octavo.frontend.kv_event_publisher import END, SNAPSHOT, KVEventPublisher
from tests.support.engine_fakes import make_core, make_request
from tests.support.free_ports import free_port
from tests.support.llm_tools import GREEDY, make_llm, prompts_of

BLOCK = 4
ROOT = BlockHashing().root()


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The batch as vLLM and its router define it, as are the structs below."""

    ts: float
    events: list["BlockStored | BlockRemoved | AllBlocksCleared"]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


DECODER = msgspec.msgpack.Decoder(EventBatch)


class Mirror:
    """The hashes that a subscriber knows to be stored."""

    def __init__(self):
        self.hashes = set()

    def take(self, batch):
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                assert event.parent_block_hash is None or event.parent_block_hash in self.hashes
                self.hashes |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert set(event.block_hashes) <= self.hashes
                self.hashes -= set(event.block_hashes)
            else:
                self.hashes.clear()


def config_of(**fields):
    ports = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("endpoint", "replay_endpoint")}
    text = json.dumps({"enable_kv_cache_events": True} | ports | fields)
    return text, parse_events_config(text)


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


@pytest.fixture
def publisher_of():
    made = []

    def start(config, **more):
        made.append(
            KVEventPublisher(config, **{"engine": 0, "root": ROOT, "block_size": BLOCK} | more)
        )
        return made[-1]

    yield start
    for one in made:
        one.close()


def asked(config, context, wanted):
    """Asks as vLLM's example does: a DEALER that reads answers until the end."""
    dealer = context.socket(zmq.DEALER)
    dealer.rcvtimeo, dealer.linger = 5000, 0
    dealer.connect(config.replay_endpoint)
    dealer.send_multipart([b"", wanted])
    answers = []
    while True:
        _, number, payload = dealer.recv_multipart()
        if number == END:
            dealer.close()
            return answers, payload
        answers.append((int.from_bytes(number, "big"), DECODER.decode(payload)))


def subscribed(config, context, publisher):
    """Returns a subscriber that has begun to receive."""
    events = context.socket(zmq.SUB)
    events.linger, events.rcvtimeo = 0, 50
    events.connect(config.endpoint)
    events.subscribe(config.topic)
    while True:
        publisher.publish([BlocksCleared()])
        try:
            events.recv_multipart()
        except zmq.Again:
            continue
        break
    events.rcvtimeo = 5000
    return events


def keys_of(tokens, salt=""):
    return BlockChain(BlockHashing(salt)).extend(tokens, len(tokens) // BLOCK, BLOCK)


def stored_of(tokens):
    keys = keys_of(tokens)
    return BlocksStored([key.digest for key in keys], keys[0].parent, list(tokens))


def test_a_subscriber_reads_batches_in_order_with_topic_and_rank(context, publisher_of):
    _, config = config_of(topic="kv@here")
    shifted = parse_events_config(
        json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{free_port()}"})
    )
    publisher = publisher_of(config)
    publisher_of(shifted, engine=1)
    events = subscribed(config, context, publisher)
    stored = stored_of(range(12))
    publisher.publish([stored])
    publisher.publish([BlocksRemoved(stored.digests[2:]), BlocksCleared()])
    numbers = []
    batches = []
    while len(batches) < 2:
        topic, number, payload = events.recv_multipart()
        assert topic == b"kv@here" and len(number) == 8
        batch = DECODER.decode(payload)
        numbers.append(int.from_bytes(number, "big"))
        if not isinstance(batch.events[0], AllBlocksCleared):
            batches.append(batch)
    events.close()
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    hashes = [get_hash(digest) for digest in stored.digests]
    assert batches[0].events == [
        BlockStored(hashes, None, list(range(12)), BLOCK, None, "GPU", None)
    ]
    assert batches[1].events == [BlockRemoved(hashes[2:], "GPU"), AllBlocksCleared()]
    assert batches[0].data_parallel_rank == 0


def test_missed_batches_are_given_again_and_the_cache_where_they_are_too_old(context, publisher_of):
    _, config = config_of(buffer_steps=4)
    publisher = publisher_of(config)
    for start in range(6):
        publisher.publish([stored_of(range(start, start + 8))])
    publisher.publish([BlocksRemoved(stored_of(range(5, 13)).digests[1:])])
    again, nothing = asked(config, context, (5).to_bytes(8, "big"))
    assert [number for number, _ in again] == [5, 6] and nothing == b""
    assert asked(config, context, (0).to_bytes(8, "big"))[0][0][0] == 3, "older ones are gone"
    ((number, batch),), epoch = asked(config, context, SNAPSHOT)
    mirror = Mirror()
    mirror.take(batch)
    digests = [
        digest for start in range(6) for digest in stored_of(range(start, start + 8)).digests
    ]
    assert number == 7 and mirror.hashes == {get_hash(digest) for digest in digests[:-1]}
    assert asked(config, context, SNAPSHOT)[1] == epoch and len(epoch) == 16
    publisher.publish([BlocksCleared()])
    ((number, batch),), later = asked(config, context, SNAPSHOT)
    assert later != epoch and number == 8 and batch.events == [AllBlocksCleared()]
    for foreign in (b"", b"junk", b"x" * 5000):
        assert asked(config, context, foreign) == ([], b"")


def test_a_secret_keeps_others_out(context, publisher_of):
    _, config = config_of(secret="a long secret")
    publisher = publisher_of(config)
    dealer = context.socket(zmq.DEALER)
    dealer.linger, dealer.rcvtimeo = 0, 300
    dealer.connect(config.replay_endpoint)
    dealer.send_multipart([b"", SNAPSHOT])
    with pytest.raises(zmq.Again):
        dealer.recv_multipart()
    dealer.close()
    publisher.close()


def test_events_tell_what_a_core_finds():
    """A mirror of the events holds the names of the cache, with evictions, resets and salts."""
    draw = random.Random(3)
    core = make_core(
        num_blocks=16, kv_events_config='{"enable_kv_cache_events": true, "publisher": "null"}'
    )
    held = set()

    def step():
        out = core.step()
        for event in out.block_events:
            if isinstance(event, BlocksStored):
                held.update(event.digests)
            elif isinstance(event, BlocksRemoved):
                assert set(event.digests) <= held
                held.difference_update(event.digests)
            else:
                held.clear()

    for number in range(40):
        prompt = [draw.randrange(3)] * draw.randrange(1, 30) + [number % 5] * 4
        salt = draw.choice(["", "a salt"])
        core.add(make_request(f"r{number}", prompt, max_tokens=6, cache_salt=salt))
        while core.has_work:
            step()
        if draw.random() < 0.1:
            assert core.query(ResetPrefixCache())
            assert core.has_work, "an idle core tells of it at once"
            step()
            assert not held and not core.has_work
        cache = core.scheduler.blocks.pools[0].cache
        assert held == {key.digest for key in cache.key_of.values()}
    assert held


def test_runs_of_a_chain_are_one_event():
    log = BlockEventLog()
    first, second, third = keys_of(range(12))
    log.stored(first.digest, first.parent, first.token_ids)
    log.stored(second.digest, second.parent, second.token_ids)
    log.removed(third)
    log.removed(second)
    assert log.pop_events() == [
        BlocksStored([first.digest, second.digest], ROOT, list(range(8))),
        BlocksRemoved([third.digest, second.digest]),
    ]
    log.stored(first.digest, first.parent, first.token_ids)
    log.cleared()
    assert log.pop_events() == [BlocksCleared()] and not log


def test_an_engine_publishes_what_its_prompts_leave(context):
    text, config = config_of()
    prompts = prompts_of(40, 70)
    with make_llm(kv_events_config=text) as llm:
        llm.generate(prompts, GREEDY)
        ((_, batch),), _ = asked(config, context, SNAPSHOT)
        mirror = Mirror()
        mirror.take(batch)
        size = batch.events[1].block_size
        expected = {
            get_hash(name)
            for prompt in prompts
            for name in BlockHashing().digests(prompt[: len(prompt) // size * size], size)
        }
        assert expected <= mirror.hashes
        with pytest.raises(ConfigError, match="cannot listen on"):
            make_llm(kv_events_config=text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("nonsense", "kv_events_config: "),
        ('{"endpoit": "tcp://127.0.0.1:1"}', "unknown field `endpoit`"),
        ('{"endpoint": "127.0.0.1:5557"}', r"expected tcp://HOST:PORT or ipc://PATH"),
        ('{"endpoint": "tcp://127.0.0.1:0"}', "got 'tcp://127.0.0.1:0'"),
        ('{"endpoint": "tcp://*:5557"}', "which other machines can reach, without secret"),
        ('{"replay_endpoint": "tcp://0.0.0.0:5558"}', "replay_endpoint: got the host '0.0.0.0'"),
        ('{"buffer_steps": 0}', "buffer_steps: got 0, expected 1 to 1,000,000"),
        ('{"publisher": "kafka"}', "Invalid enum value 'kafka'"),
    ],
)
def test_a_wrong_config_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        parse_events_config(fields)


def test_events_without_a_prefix_cache_are_refused():
    with pytest.raises(ConfigError, match="requires kv_cache and enable_prefix_caching"):
        make_llm(kv_events_config=config_of()[0], enable_prefix_caching=False)
