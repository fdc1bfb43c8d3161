"""Requests that are changed and forked between two steps: in the core, across processes, in a
recording, and when an engine is replaced.
"""

import random
import threading
import time

import msgspec
import pytest

from octavo.api.sampling_params import SamplingParams
from octavo.engine.clients.in_process import InProcessClient
from octavo.engine.clients.process import ProcessClient
from octavo.engine.protocol.requests import RequestChange, ViewEngine
from octavo.engine.protocol.view import CACHED, HELD, SHARED
from octavo.engine.recording.recorder import RequestChanged, read_log
from octavo.engine.recording.replay import Replay
from tests.engine.recording.test_replay import MovingClock, recorded_core
from tests.support.core_builders import INFO, build
from tests.support.engine_fakes import (
    LaunchingExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)
from tests.support.supervised_cores import NotedClient

BUILDER = "tests.support.core_builders:build"


def change(name, max_tokens=8, priority=0, **fields):
    return RequestChange(name, SamplingParams(max_tokens=max_tokens, **fields), priority)


def steps(core, count):
    """Returns the tokens of each request in the next steps."""
    found = {}
    for _ in range(count):
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


# -- changes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_steps", [1, 8])
@pytest.mark.parametrize("new", [11, 40])
def test_a_request_ends_at_its_new_length(runs_ahead, num_steps, new):
    if runs_ahead and num_steps > 1:
        num_steps = 1  # an engine that runs ahead plans one step at a time
    core = make_core(runs_ahead=runs_ahead, num_scheduler_steps=num_steps)
    core.add(make_request("a", [1, 2, 3], max_tokens=20))
    before = steps(core, 3).get("a", [])
    core.change(change("a", max_tokens=new))
    found = run_all(core)["a"]
    assert before + tokens_of(found) == expected_tokens([1, 2, 3], new)
    assert found[-1].finish_reason == "length"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_request_that_is_longer_than_its_new_length_ends_at_once(runs_ahead):
    core = make_core(runs_ahead=runs_ahead)
    core.add(make_request("a", [1, 2, 3], max_tokens=20))
    core.add(make_request("b", [4], max_tokens=20))
    before = steps(core, 9)["a"]
    core.change(change("a", max_tokens=3))
    found = run_all(core)
    assert [output.finish_reason for output in found["a"]] == ["length"]
    assert tokens_of(found["a"]) == [] and before == expected_tokens([1, 2, 3], len(before))
    stats = core.scheduler.stats()
    assert stats.num_used_blocks == 0 and stats.num_running == 0


def test_a_change_of_an_unknown_request_is_left_alone():
    core = make_core()
    core.change(change("gone"))
    core.add(make_request("a", [1]))
    assert tokens_of(run_all(core)["a"]) == expected_tokens([1], 8)


def test_a_length_beyond_the_context_is_cut_to_it():
    core = make_core(max_model_len=40)
    core.add(make_request("a", [1] * 10, max_tokens=4))
    core.change(change("a", max_tokens=1000))
    assert len(tokens_of(run_all(core)["a"])) == 30


def test_a_waiting_request_starts_by_its_new_priority():
    core = make_core(max_num_seqs=1, scheduling_policy="priority")
    for name in "abcd":
        core.add(make_request(name, [ord(name)], max_tokens=2, priority=5))
    core.step()
    core.change(change("d", max_tokens=2, priority=1))
    core.change(change("b", max_tokens=2, priority=9))
    order = []
    while core.has_work:
        order += [one.request_id for one in core.step().outputs if one.finish_reason]
    assert order == ["a", "d", "c", "b"]


def test_changes_and_forks_are_in_the_recording(tmp_path):
    """A replay applies them where they were applied, with preemptions and steps in flight."""
    draw = random.Random(4)
    executor = LaunchingExecutor(windows=[None, 40])
    core = recorded_core(
        tmp_path / "log", executor, MovingClock(), runs_ahead=True, scheduling_policy="priority"
    )
    for index in range(60):
        prompt = [index % 5] * draw.randrange(1, 60)
        core.add(make_request(str(index), prompt, max_tokens=draw.randrange(2, 60)))
        if index and draw.random() < 0.3:
            parent = str(draw.randrange(index))
            if parent_agrees(core, parent, prompt):
                fork = {"fork_of": parent, "fork_tokens": draw.randrange(1, 9)}
                core.add(make_request(f"{index}f", [*prompt, 7], **fork))
        for _ in range(draw.randrange(4)):
            core.step()
        name = str(draw.randrange(index + 1))
        core.change(change(name, draw.randrange(1, 60), draw.randrange(3)))
    while core.has_work:
        core.step()
    core.close()
    assert core.scheduler.stats().num_preemptions > 0
    header, events = read_log(tmp_path / "log")
    events = list(events)
    assert sum(isinstance(event, RequestChanged) for event in events) == 60
    found = Replay(header).run(events)
    assert found.differences == [] and found.num_steps == core.scheduler.stats().num_steps


def parent_agrees(core, parent, prompt):
    request = core.scheduler.queues.by_id.get(parent)
    return request is not None and request.token_ids[:8] == prompt[:8] and len(prompt) >= 8


# -- forks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_kept", [1, 15, 16, 17, 31, 40])
def test_a_fork_of_a_running_request_shares_its_blocks(caching, runs_ahead, num_kept):
    """All kept tokens are found, whole blocks are shared and the last one is copied; both go on as
    if they were alone.
    """
    core = make_core(caching=caching, runs_ahead=runs_ahead)
    prompt = list(range(100, 120))
    core.add(make_request("a", prompt, max_tokens=60))
    tokens = steps(core, 45)["a"]
    held = core.scheduler.blocks.pools[0].counts()
    start = [*prompt, *tokens[:num_kept], 5]
    num_shared = len(prompt) + num_kept
    core.add(make_request("f", start, max_tokens=9, fork_of="a", fork_tokens=num_shared))
    found = {}
    while "f" not in found:
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).append(output)
    assert found["f"][0].num_cached_tokens == num_shared
    pool = core.scheduler.blocks.pools[0].counts()
    assert pool.num_shared == num_shared // 16
    assert pool.num_held <= held.num_held + 2, "a block of its own, and the parent's next"
    for name, outputs in run_all(core).items():
        found.setdefault(name, []).extend(outputs)
    assert tokens_of(found["f"]) == expected_tokens(start, 9)
    assert tokens + tokens_of(found["a"]) == expected_tokens(prompt, 60)
    assert core.scheduler.stats().num_used_blocks == 0


def test_a_fork_computes_only_what_its_parent_has_not():
    """The steps of a fork hold its own tokens alone."""
    core = make_core(caching=False)
    prompt = list(range(40))
    core.add(make_request("a", prompt, max_tokens=30))
    tokens = steps(core, 10)["a"]
    start = [*prompt, *tokens[:6], 1, 2, 3]
    core.add(make_request("f", start, max_tokens=2, fork_of="a", fork_tokens=46))
    run_all(core)
    computed = [row for plan in core.executor.plans for row in plan.rows if row.request_id == "f"]
    assert [(row.start, row.num_tokens) for row in computed] == [(46, 3), (49, 1)]


def test_a_fork_while_its_parent_still_computes_its_prompt_shares_what_there_is():
    core = make_core(budget=32, caching=False)
    prompt = list(range(100))
    core.add(make_request("a", prompt, max_tokens=4))
    core.step()
    core.add(make_request("f", [*prompt, 9], max_tokens=4, fork_of="a", fork_tokens=100))
    found = run_all(core)
    assert tokens_of(found["f"]) == expected_tokens([*prompt, 9], 4)
    assert tokens_of(found["a"]) == expected_tokens(prompt, 4)
    first = next(one for one in found["f"] if one.token_ids)
    assert first.num_cached_tokens >= 32


@pytest.mark.parametrize("gone", ["finished", "swapped", "preempted", "virtual"])
def test_a_fork_whose_parent_has_no_blocks_is_a_request_by_itself(gone):
    options = {"kv_layout": "virtual", "caching": False} if gone == "virtual" else {}
    core = make_core(num_blocks=12, num_host_blocks=12, **options)
    prompt = list(range(50))
    core.add(make_request("a", prompt, max_tokens=60 if gone != "finished" else 3))
    steps(core, 12 if gone == "finished" else 4)
    if gone in ("swapped", "preempted"):
        mode = {"swapped": "swap", "preempted": "recompute"}[gone]
        core = make_core(num_blocks=12, num_host_blocks=12, preemption_mode=mode)
        for name in "bca":
            core.add(make_request(name, prompt, max_tokens=60))
        while core.scheduler.queues.by_id.get("a").status.value == "running":
            core.step()
    core.add(make_request("f", [*prompt, 9], max_tokens=4, fork_of="a", fork_tokens=50))
    found = run_all(core)
    assert tokens_of(found["f"]) == expected_tokens([*prompt, 9], 4)


@pytest.mark.parametrize("windows", [[None, 20], [20]])
def test_forks_outside_a_window_are_computed_again(windows):
    core = make_core(windows=windows)
    prompt = list(range(30))
    core.add(make_request("a", prompt, max_tokens=90))
    tokens = steps(core, 70)["a"]
    for name, kept in (("early", 3), ("late", 66)):
        start = [*prompt, *tokens[:kept], 4]
        core.add(make_request(name, start, fork_of="a", fork_tokens=30 + kept))
        found = run_all(core)
        assert tokens_of(found[name]) == expected_tokens(start, 8)


# -- clients ---------------------------------------------------------------------------------------


@pytest.fixture(params=["in process", "own process"])
def client(request):
    if request.param == "in process":
        client = InProcessClient(build({"kind": "slow"}, print)[0], INFO)
    else:
        client = ProcessClient(BUILDER, {"kind": "slow"})
        client.wait_until_ready(lambda text: None)
    yield client
    client.close()


def receive_all(client, found, num_finals, views=None):
    """Receives until that many requests have ended."""
    while num_finals:
        step = client.receive(timeout_s=10)
        assert step is not None
        if step.view is not None and views is not None:
            views.append(step.view)
        for output in step.outputs:
            found.setdefault(output.request_id, []).append(output)
            num_finals -= output.finish_reason is not None


def test_changes_cross_to_the_core(client):
    client.add([make_request("a", [1, 2], max_tokens=100), make_request("b", [3], max_tokens=20)])
    found = {}
    for _ in range(3):
        for output in client.receive(timeout_s=10).outputs:
            found.setdefault(output.request_id, []).append(output)
    client.change([change("a", max_tokens=60), change("none")])
    receive_all(client, found, 2)
    assert found["a"][-1].finish_reason == "length"
    assert tokens_of(found["a"]) == expected_tokens([1, 2], 60)


def test_views_come_while_the_engine_is_watched_and_on_request(client):
    found, views = {}, []
    client.add([make_request("a", [1] * 40, max_tokens=60)])
    receive_all(client, found, 1, views)
    assert views == [], "an engine that nothing watches makes none"
    client.watch(0.02)
    client.add([make_request("b", [2] * 40, max_tokens=60), make_request("c", [2] * 40)])
    receive_all(client, found, 2, views)
    marks = [step for view in views for step in view.steps]
    assert len(views) > 2 and [mark.step for mark in marks] == list(
        range(marks[0].step, marks[-1].step + 1)
    )
    assert sum(mark.num_decode_tokens for mark in marks) >= 60
    first = next(view for view in views if view.requests)
    shown = {one.request_id: one for one in first.requests}
    assert shown["b"].state == "running" and shown["b"].num_prompt_tokens == 40
    states = {run.state for run in first.blocks[0].runs}
    assert HELD in states and states <= {0, CACHED, HELD, SHARED}
    assert sum(run.num_blocks for run in first.blocks[0].runs) == first.blocks[0].num_shown
    assert views[-1].requests == [], "the last step's view is sent in any case"
    client.watch(0.0)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(client.query(ViewEngine(with_blocks=True)))
    )
    thread.start()
    while thread.is_alive():
        client.receive(timeout_s=0.1)
    assert answers[0].requests == [] and len(answers[0].blocks) == 1


def test_a_view_says_why_requests_wait():
    core = make_core(max_num_seqs=1)
    for name in "abc":
        core.add(make_request(name, [1, 2, 3]))
    core.step()
    first, second, third = core.query(ViewEngine(with_blocks=False)).requests
    assert (first.request_id, first.state, first.waits_for) == ("a", "running", "")
    assert second.waits_for == third.waits_for == "batch full"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(second))["state"] == "waiting"


@pytest.mark.alone
def test_a_replaced_engine_keeps_changed_params_and_the_watch():
    client = NotedClient("crash")
    try:
        client.watch(0.01)
        client.add([make_request("a", [1, 2, 3], max_tokens=400)])
        found, views = {}, []
        while len(tokens_of(found.get("a", []))) < 5:
            step = client.receive(timeout_s=10)
            for output in step.outputs:
                found.setdefault(output.request_id, []).append(output)
        client.change([change("a", max_tokens=90)])
        client.add([make_request("bad", [1, 1001], max_tokens=3)])
        end = time.monotonic() + 60
        while not any(output.finish_reason for output in found["a"]):
            assert time.monotonic() < end
            step = client.receive(timeout_s=10)
            if step.view is not None and len(client.starts) > 1:
                views.append(step.view)
            for output in step.outputs:
                found.setdefault(output.request_id, []).append(output)
        assert len(client.starts) > 1 and views
        assert tokens_of(found["a"]) == expected_tokens([1, 2, 3], 90)
    finally:
        client.close()
