"""Cache groups with a window: blocks that no query sees any more are released, and all that shares
blocks takes account of it.
"""

import pytest

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.kv.block_pool import HOLE, BlockGroup
from octavo.engine.protocol.kv_cache_spec import SlidingWindowSpec
from tests.support.engine_fakes import (
    FakeExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)

WINDOW = 40


def test_a_request_holds_the_blocks_of_its_window_only():
    core = make_core(num_blocks=64, windows=[None, WINDOW], caching=False)
    core.add(make_request("a", list(range(300)), max_tokens=100))
    most = [0, 0]
    while core.has_work:
        core.step()
        for group, pool in enumerate(core.scheduler.blocks.pools):
            most[group] = max(most[group], pool.num_blocks - len(pool.free))
    assert most == [25, 4], "400 tokens; and the 40 that the next token sees"


def test_with_windows_alone_a_request_may_be_longer_than_the_cache():
    core = make_core(num_blocks=9, windows=[WINDOW], max_model_len=500)
    assert core.scheduler.blocks.capacity_tokens > 500
    prompt = [i % 50 for i in range(300)]
    core.add(make_request("a", prompt, max_tokens=200))
    assert tokens_of(run_all(core)["a"]) == expected_tokens(prompt, 200)
    small = make_core(num_blocks=6, windows=[WINDOW], max_model_len=500)
    assert small.scheduler.blocks.capacity_tokens == 96, (
        "a step's tokens do not fit beside the window"
    )


@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_windows_with_prefix_hits_forks_and_preemption(budget, mode):
    executor = FakeExecutor(windows=[None, WINDOW])
    core = make_core(
        num_blocks=24,
        num_host_blocks=24,
        windows=[None, WINDOW],
        budget=budget,
        executor=executor,
        preemption_mode=mode,
        max_num_seqs=6,
    )
    prefix = [j % 11 for j in range(100)]
    prompts = {str(i): prefix + [100 + i] * (3 * i) for i in range(5)}
    for _ in range(2):
        for name, prompt in prompts.items():
            core.add(make_request(name, prompt, max_tokens=50))
            core.add(make_request(name + "#1", prompt, max_tokens=50, sample_index=1, fork_of=name))
        found = run_all(core)
        for name, prompt in prompts.items():
            assert tokens_of(found[name]) == expected_tokens(prompt, 50)
            assert tokens_of(found[name + "#1"]) == expected_tokens(prompt, 50, 1)
    stats = core.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.prefix_hit_tokens > 0
    assert (stats.num_swaps > 0) == (mode == "swap")


def manager(num_blocks=16, window=10):
    return BlockManager(
        [BlockGroup(num_blocks), BlockGroup(num_blocks, SlidingWindowSpec(window))],
        block_size=4,
        enable_prefix_caching=True,
    )


def test_a_hit_needs_only_what_the_next_token_sees():
    blocks = manager()
    tokens = list(range(32))
    blocks.start("a", tokens, reserve=0)
    blocks.record("a", tokens, 32)
    assert [block_id == HOLE for block_id in blocks.block_ids("a")[1]] == [True] * 5 + [False] * 3
    blocks.free("a")
    window = blocks.pools[1]
    for key in blocks.pools[0].cache.key_of.values():
        if key.token_ids[0] < 16:
            window.cache.remove(window.cache.find(key))
    assert blocks.start("b", [*tokens, 99], reserve=0).num_cached_tokens == 32, (
        "the window's first four blocks are not needed"
    )
    assert blocks.start("c", tokens[:29], reserve=0).num_cached_tokens == 28
    assert blocks.start("d", tokens[:24], reserve=0).num_cached_tokens == 0, (
        "token 20 sees 11 to 20, and 12 to 15 are gone"
    )


def test_a_fork_is_made_only_where_the_parent_still_has_its_window():
    blocks = manager()
    tokens = list(range(30))
    blocks.start("a", tokens[:12], reserve=0)
    blocks.record("a", tokens, 12)
    assert blocks.can_fork("a", 11)
    blocks.grow("a", 12, 30)
    blocks.record("a", tokens, 30)
    assert not blocks.can_fork("a", 11) and blocks.can_fork("a", 29)
    assert not blocks.can_fork("unknown", 1)


def test_siblings_whose_prompt_has_passed_the_window_start_by_themselves():
    """The siblings find no place until the first sample is far beyond its prompt."""
    core = make_core(windows=[None, 20], max_num_seqs=2, caching=False)
    prompt = list(range(30))
    core.add(make_request("other", [1, 2, 3], max_tokens=60))
    core.add(make_request("p", prompt, max_tokens=90))
    core.add(make_request("p#1", prompt, max_tokens=20, sample_index=1, fork_of="p"))
    found = run_all(core)
    assert tokens_of(found["p#1"]) == expected_tokens(prompt, 20, 1)


def test_a_failed_requests_blocks_behind_the_window_are_not_found_either():
    executor = FakeExecutor(windows=[None, WINDOW])
    core = make_core(windows=[None, WINDOW], executor=executor)
    prompt = list(range(200))
    core.add(make_request("bad", prompt))
    core.step()
    core.step()
    executor.fail_on = {"bad": "NaN"}
    run_all(core)
    assert all(len(pool.cache.key_of) == 0 for pool in core.scheduler.blocks.pools)
