"""Background requests stand behind all others, under every policy."""

import random

import pytest

from octavo.engine.protocol.requests import BACKGROUND_PRIORITY
from tests.support.engine_fakes import (
    FakeExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)

every_policy = pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])


def background(name, prompt, **fields):
    return make_request(name, prompt, priority=BACKGROUND_PRIORITY, **fields)


@every_policy
def test_background_requests_start_where_no_other_waits(policy):
    executor = FakeExecutor()
    core = make_core(max_num_seqs=1, scheduling_policy=policy, executor=executor)
    for index in range(2):
        core.add(background(f"line{index}", [1, 2], max_tokens=2))
        core.add(make_request(f"user{index}", [1, 2], max_tokens=2))
    run_all(core)
    starts = dict.fromkeys(new.request_id for plan in executor.plans for new in plan.new_rows)
    assert list(starts) == ["user0", "user1", "line0", "line1"]


@every_policy
def test_a_background_request_gives_way_though_it_started_first(policy):
    core = make_core(num_blocks=5, max_num_seqs=3, scheduling_policy=policy, watermark=0.0)
    core.add(background("line", [5] * 16, max_tokens=50))
    core.step()
    core.add(make_request("user", [0] * 16, max_tokens=50))
    found = run_all(core)
    assert found["line"][-1].num_preemptions > 0
    assert found["user"][-1].num_preemptions == 0
    assert tokens_of(found["line"]) == expected_tokens([5] * 16, 50)[1:]  # one came before
    assert tokens_of(found["user"]) == expected_tokens([0] * 16, 50)


@every_policy
def test_a_step_serves_background_requests_last(policy):
    executor = FakeExecutor()
    core = make_core(budget=10, scheduling_policy=policy, executor=executor)
    core.add(background("line", list(range(40))))
    core.step()
    core.add(make_request("user", list(range(100, 130))))
    core.step()
    core.step()
    rows = [[(row.request_id, row.num_tokens) for row in plan.rows] for plan in executor.plans]
    assert rows[0] == [("line", 10)]
    assert rows[1] == [("line", 5), ("user", 5)], "a user's prompt starts beside a long line"
    assert rows[2] == [("user", 10)]


@every_policy
def test_every_request_ends_with_its_own_tokens_in_any_mix(policy):
    draw = random.Random(7)
    core = make_core(num_blocks=12, max_num_seqs=4, scheduling_policy=policy)
    prompts = {
        str(index): [draw.randrange(300) for _ in range(draw.randrange(1, 40))]
        for index in range(24)
    }
    for name, prompt in prompts.items():
        priority = BACKGROUND_PRIORITY if draw.random() < 0.5 else 0
        core.add(make_request(name, prompt, max_tokens=12, priority=priority))
    found = run_all(core)
    for name, prompt in prompts.items():
        assert tokens_of(found[name]) == expected_tokens(prompt, 12)
    assert core.scheduler.blocks.num_free_blocks == 12
