"""The KV budget and its messages."""

import pytest

from octavo.api.errors import ConfigError
from octavo.engine.protocol.kv_cache_spec import KvDemand, SlidingWindowSpec
from octavo.worker.memory import GroupSize, plan_kv

MIB = 1 << 20


def plan(
    *windows,
    max_model_len=160,
    max_num_seqs=4,
    max_step_tokens=32,
    wanted_bytes=None,
    available_bytes=1 << 40,
):
    """Plans a growing group with blocks of 1 MiB, and one with each of the windows."""
    groups = [GroupSize(MIB), *(GroupSize(MIB, SlidingWindowSpec(window)) for window in windows)]
    demand = KvDemand(max_model_len, max_num_seqs, max_step_tokens)
    return plan_kv(groups, demand, wanted_bytes=wanted_bytes, available_bytes=available_bytes)


def test_default_holds_every_request_whole():
    assert plan().num_blocks == (40,)


def test_default_takes_half_of_what_is_free():
    assert plan(available_bytes=40 * MIB).num_blocks == (20,)


def test_given_bytes_are_taken():
    budget = plan(wanted_bytes=100 * MIB + 5)
    assert (budget.num_blocks, budget.num_tokens) == ((100,), 1600)
    assert budget.describe() == "KV cache 100.0 MiB: 1,600 tokens, 10 requests of 160"


def test_too_little_given():
    with pytest.raises(ConfigError) as error:
        plan(wanted_bytes=5 * MIB)
    assert str(error.value) == (
        "kv_cache_memory_bytes: got 5.0 MiB, expected at least 10.0 MiB for one request of 160"
        " tokens\n"
        "hint: raise kv_cache_memory_bytes, or set max_model_len to at most 80"
    )


def test_too_little_free():
    with pytest.raises(
        ConfigError,
        match=r"not enough memory: 50% of the free memory: got 4.0 MiB, expected at least 10.0 MiB",
    ):
        plan(available_bytes=8 * MIB)


def test_a_window_gets_what_its_requests_can_hold_and_no_more():
    """Four requests need 2 blocks of 32 tokens and 3 more each, and a step needs 2 blocks and 1."""
    budget = plan(32, wanted_bytes=123 * MIB)
    assert budget.num_blocks == (100, 23)
    assert (budget.num_tokens, budget.num_bytes) == (1600, 123 * MIB)
    assert budget.describe() == "KV cache 123.0 MiB: 1,600 tokens, 4 requests of 160"
    assert plan(32, wanted_bytes=40 * MIB).num_blocks == (20, 20)
    assert plan(1000, wanted_bytes=40 * MIB).num_blocks == (20, 20)


def test_windows_alone_take_what_they_can_use():
    demand = KvDemand(max_model_len=10_000, max_num_seqs=2, max_step_tokens=32)
    budget = plan_kv(
        [GroupSize(MIB, SlidingWindowSpec(64))],
        demand,
        wanted_bytes=100 * MIB,
        available_bytes=None,
    )
    assert budget.num_blocks == (2 * 7 + 3,)
    with pytest.raises(
        ConfigError,
        match=r"got 6.0 MiB, expected at least 7.0 MiB for one request of 10,000 tokens",
    ):
        plan_kv(
            [GroupSize(MIB, SlidingWindowSpec(64))],
            demand,
            wanted_bytes=6 * MIB,
            available_bytes=None,
        )
