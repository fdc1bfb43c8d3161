"""Routing policies: who gets a request, and what that comes to on a trace of a real service."""

import random

import pytest

from benchmarks.route import TRACE, read_trace, shared_hit_share, simulate
from octavo.engine.protocol.block_hashes import BlockChain, BlockHashing
from octavo.engine.protocol.cached_hashes import CachedHashes
from octavo.engine.routing.job import RoutingJob
from octavo.engine.routing.policies import ROUTING_POLICIES
from octavo.engine.routing.router import Router
from octavo.engine.routing.target import Target

BLOCK = 16


def router_of(policy: str, count: int = 3) -> Router:
    return Router(ROUTING_POLICIES[policy](), [Target(f"engine {index}") for index in range(count)])


def job_of(*names: str, session: bytes = b"") -> RoutingJob:
    return RoutingJob(BLOCK * len(names) + 1, [name.encode() for name in names], BLOCK, session)


@pytest.fixture(scope="module")
def trace():
    return read_trace(TRACE)


def test_kv_finds_what_one_cache_would_and_spreads_the_work(trace):
    """Hits and balance are one property: all requests of the trace share their first block."""
    shared = shared_hit_share(trace)
    assert shared == pytest.approx(0.2941, abs=1e-4)
    got = simulate(trace, "kv", 4, load=0.8)
    assert got.hit_share >= 0.95 * shared and got.imbalance <= 1.1
    turns = simulate(trace, "round_robin", 4, load=0.8)
    assert turns.hit_share == pytest.approx(0.1306, abs=1e-4)


def test_a_prefix_is_copied_to_a_less_busy_engine_where_they_share_a_store():
    """The prompt's blocks are in engine 0, which has a queue: longer than half of the prompt, and
    shorter than all of it.
    """

    def chosen(queue: int, *pools: str) -> int:
        router = router_of("kv", 2)
        for target, pool in zip(router.targets, pools, strict=True):
            target.pool = pool
        job = job_of(*map(str, range(10)))
        router.sent("before", job, 0, 0.0)
        router.record_tokens("before", 1, 0.0)
        router.ended("before")
        router.sent("queue", RoutingJob(queue), 0, 0.0)
        return router.choose(job, range(2), 0.0)

    assert chosen(400, "", "") == 0  # less than 4 x 160 tokens to be computed
    assert chosen(400, "a", "b") == 0
    assert chosen(400, "a", "a") == 1  # more than 4 x 80 to be copied
    assert chosen(200, "a", "a") == 0


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_books_are_empty_once_all_requests_have_ended(policy):
    """Whatever the order of tokens and ends, no load is left on a target, and no rate is wrong."""
    draw, router, unfinished = random.Random(1), router_of(policy), []
    for number in range(400):
        now = number / 10
        job = job_of(*[f"{draw.randrange(4)}/{depth}" for depth in range(draw.randrange(5))])
        index = router.choose(job, range(3), now)
        assert 0 <= index < 3
        router.sent(str(number), job, index, now)
        unfinished.append(str(number))
        for name in draw.sample(unfinished, draw.randrange(min(3, len(unfinished)))):
            router.record_tokens(name, draw.randrange(3), now)
        if draw.random() < 0.7:
            name = unfinished.pop(draw.randrange(len(unfinished)))
            router.ended(name)
            router.ended(name)
    for name in unfinished:
        router.ended(name)
    for target in router.targets:
        assert (target.queued_tokens, target.held_tokens) == (0, 0)
        assert target.rate is None or target.rate > 0


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_only_an_allowed_target_is_chosen(policy):
    router = router_of(policy)
    for number in range(20):
        job = job_of(str(number), session=bytes([number]))
        assert router.choose(job, [2], 0.0) == 2
        assert router.choose(job, [0, 2], 0.0) in (0, 2)


def test_round_robin_gives_each_a_turn():
    router = router_of("round_robin")
    assert [router.choose(job_of("a"), range(3), 0.0) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_least_tokens_counts_what_is_unfinished():
    router = router_of("least_tokens", 2)
    router.sent("long", RoutingJob(100), 0, 0.0)
    router.sent("short", RoutingJob(10), 1, 0.0)
    assert router.choose(RoutingJob(1), range(2), 0.0) == 1
    router.record_tokens("short", 200, 1.0)
    assert router.choose(RoutingJob(1), range(2), 1.0) == 0
    router.ended("short")
    assert router.choose(RoutingJob(1), range(2), 1.0) == 1


def test_sessions_stay_and_move_only_when_their_target_is_gone():
    router = router_of("sticky", 4)
    sessions = [job_of(session=f"user {number}".encode()) for number in range(200)]
    homes = [router.choose(job, range(4), 0.0) for job in sessions]
    assert set(homes) == {0, 1, 2, 3}
    for job, home in zip(sessions, homes, strict=True):
        assert router.choose(job, range(4), 9.0) == home
        without = router.choose(job, [0, 1, 3], 9.0)
        assert without == home or home == 2


def test_sessions_spread_over_targets_with_long_names_that_begin_alike():
    labels = [f"https://{'machine' * 12}.example.com:{port}" for port in (8000, 8001)]
    router = Router(ROUTING_POLICIES["sticky"](), [Target(label) for label in labels])
    homes = {router.choose(job_of(session=b"%d" % one), range(2), 0.0) for one in range(50)}
    assert homes == {0, 1}


def test_kv_goes_to_the_cache_until_its_queue_is_too_long():
    router = router_of("kv", 2)
    prefix = [f"block {index}" for index in range(64)]
    router.sent("first", job_of(*prefix), 1, 0.0)
    router.ended("first")
    again = job_of(*prefix, "tail")
    assert router.choose(again, range(2), 0.0) == 1
    router.sent("other", RoutingJob(BLOCK * 64 * 5), 1, 0.0)
    assert router.choose(again, range(2), 0.0) == 0


def test_the_rate_is_that_of_the_queue():
    """Prompts of one engine are computed one after the other: each counts for its own time."""
    router = router_of("kv", 1)
    router.sent("a", RoutingJob(1000), 0, 0.0)
    router.sent("b", RoutingJob(500), 0, 0.0)
    router.record_tokens("a", 1, 10.0)
    router.record_tokens("b", 1, 15.0)
    assert router.targets[0].rate == pytest.approx(100)
    router.sent("c", RoutingJob(1000), 0, 20.0)
    assert router.targets[0].backlog(23.0) == pytest.approx(700)


def test_names_out_of_use_are_forgotten():
    names = CachedHashes(8)
    names.add([b"a", b"b", b"c"])
    for number in range(20):
        names.add([b"a", bytes([number])])
        assert names.num_known([b"a", bytes([number])]) == 2 and len(names) <= 8 + 2
    assert names.num_known([b"b"]) == 0
    names.remove([b"a", b"unknown"])
    assert names.num_known([b"a"]) == 0
    names.clear()
    assert len(names) == 0


@pytest.mark.parametrize(
    "line", ["[]", "{}", "nonsense", '{"timestamp": 0, "input_length": 1, "hash_ids": ["a"]}']
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "hash_ids": []}\n' + line)
    with pytest.raises(ValueError, match=r"trace\.jsonl:2: not a line of a trace"):
        read_trace(path)


def test_digests_are_the_names_of_blocks():
    """The router's short cut makes the names that engines give to blocks."""
    tokens = [random.Random(2).randrange(1 << 30) for _ in range(75)]
    hashing = BlockHashing("a salt")
    keys = BlockChain(hashing).extend(tokens, 4, BLOCK)
    assert hashing.digests(tokens, BLOCK) == [key.digest for key in keys]
