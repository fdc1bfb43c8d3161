"""Engines that share their steps: who is behind, who is called, and that an end is noticed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from octavo.api.errors import EngineDead, PeerEngineDead
from octavo.engine.protocol.step import StepPlan, StepResult
from octavo.wiring.engine_rendezvous import EngineEndpoint, EngineGenerations
from octavo.worker.engine_links import EngineLinks
from octavo.worker.joined_executor import JoinedExecutor

SOON_S = 10.0


def joined(num_engines: int = 2) -> list[EngineLinks]:
    ends: list[dict[int, int]] = [{} for _ in range(num_engines)]
    for a in range(num_engines):
        for b in range(a + 1, num_engines):
            one, other = socket.socketpair()
            ends[a][b], ends[b][a] = one.detach(), other.detach()
    return [
        EngineLinks(index, [files[at] for at in sorted(files)]) for index, files in enumerate(ends)
    ]


@pytest.fixture
def pair() -> Iterator[list[EngineLinks]]:
    links = joined()
    yield links
    for one in links:
        one.close()


def called(links: EngineLinks) -> threading.Event:
    event = threading.Event()
    links.when_called(event.set)
    return event


def test_the_first_to_begin_calls_the_others(pair: list[EngineLinks]) -> None:
    first, second = pair
    call = called(second)
    first.begin()
    assert call.wait(SOON_S) and second.is_behind and not first.is_behind
    second.begin()
    assert not second.is_behind


def test_a_step_that_both_begin_at_once_is_one(pair: list[EngineLinks]) -> None:
    first, second = pair
    calls = [called(first), called(second)]
    barrier = threading.Barrier(2)

    def run(links: EngineLinks) -> None:
        for _ in range(500):
            barrier.wait()
            links.begin()

    threads = [threading.Thread(target=run, args=(links,)) for links in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not first.is_behind and not second.is_behind
    for call in calls:
        call.clear()
    second.begin()
    assert calls[0].wait(SOON_S) and first.is_behind


def test_an_end_is_told_once_by_its_number() -> None:
    links = joined(3)
    told: list[str] = []
    loss = threading.Event()
    links[0].when_lost(lambda error: (told.append(error.message), loss.set()))
    links[2].close()
    assert loss.wait(SOON_S)
    assert told == ["engine 2 of 3 has ended; its experts are missing"]
    assert isinstance(links[1].await_loss(SOON_S), PeerEngineDead)
    for one in links[:2]:
        one.close()


class Recorder:
    """An executor that notes its plans, or raises."""

    progress = 0

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.error: Exception | None = None

    def execute(self, plan: StepPlan, between: object = None) -> StepResult:
        if self.error is not None:
            raise self.error
        self.plans.append(plan)
        return StepResult(plan.step, [])


def plan(*, rows: int = 0) -> StepPlan:
    return StepPlan(1, [], [], [], [None] * rows)  # type: ignore[list-item]


def test_plans_without_rows_join_steps_that_others_have_begun(pair: list[EngineLinks]) -> None:
    own, other = pair
    recorder = Recorder()
    executor = JoinedExecutor(recorder, own)  # type: ignore[arg-type]
    executor.execute(plan())
    call = called(own)
    other.begin()
    assert call.wait(SOON_S)
    executor.execute(plan())
    executor.execute(plan())
    executor.execute(plan(rows=1))
    assert [one.is_dummy_step for one in recorder.plans] == [False, True, False, False]
    other_call = called(other)
    assert other_call.wait(SOON_S) and other.is_behind


def test_a_fault_ends_the_engine_and_another_s_end_is_its_reason(pair: list[EngineLinks]) -> None:
    own, other = pair
    recorder = Recorder()
    executor = JoinedExecutor(recorder, own)  # type: ignore[arg-type]
    recorder.error = ValueError("a slot outside")
    with pytest.raises(EngineDead, match="ValueError: a slot outside"):
        executor.execute(plan(rows=1))
    recorder.error = EngineDead("another rank has ended within a collective")
    other.close()
    with pytest.raises(PeerEngineDead, match="engine 1 of 2"):
        executor.execute(plan(rows=1))


def test_generations_meet_apart_and_a_missed_one_is_left() -> None:
    generations = EngineGenerations(2, 1)
    with generations.open_endpoint(0, 0) as one:
        first = socket.socket(fileno=os.dup(one.links[0]))
    with generations.open_endpoint(1, 0) as two:
        second = socket.socket(fileno=os.dup(two.links[0]))
    first.sendall(b"x")
    assert second.recv(1) == b"x"
    second.close()
    assert first.recv(1) == b""  # nothing of the rendezvous is held here any more
    first.close()
    with generations.open_endpoint(0, 1) as one:
        waiting = socket.socket(fileno=os.dup(one.links[0]))
    with generations.open_endpoint(1, 2):
        assert waiting.recv(1) == b""  # the other engine never comes to generation 1
    waiting.close()


def test_a_place_is_the_same_in_numbers() -> None:
    place = EngineEndpoint(1, (7, 8), (9,))
    assert EngineEndpoint.from_numbers(place.to_numbers()) == place
