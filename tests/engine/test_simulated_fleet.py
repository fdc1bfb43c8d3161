"""Fleets of real schedulers on simulated clocks: queues, caches, roles and links show in the times,
and the search finds the layout that serves a trace best.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.api.errors import ConfigError
from octavo.tools.layout_search import Objective, goodput, list_layouts, read_engine
from octavo.tools.simulated_fleet import (
    FleetLayout,
    FleetOptionsSimulated,
    SimulatedFleet,
    SimulatedRequest,
)
from tests.support.simulated_engines import ENGINE, recording

FAST = FleetOptionsSimulated(link_bytes_per_s=1e12)


def requests_of(*arrivals: float, num_prompt: int = 128, num_output: int = 5):
    """Returns requests whose prompts have nothing in common."""
    return [
        SimulatedRequest(f"r{at}", when, [1000 * at + i for i in range(num_prompt)], num_output)
        for at, when in enumerate(arrivals)
    ]


def run(layout: FleetLayout, requests, options: FleetOptionsSimulated = FAST, engine=ENGINE):
    return SimulatedFleet(engine, layout, options).run(requests)


def test_a_request_alone_takes_what_its_steps_cost() -> None:
    (request,) = run(FleetLayout(1), requests_of(3.0))
    assert request.ttft == pytest.approx(0.128)
    assert request.tpot == pytest.approx(0.01) and request.num_tokens == 5


def test_requests_that_come_at_once_wait_for_one_engine_and_not_for_two() -> None:
    (first, second) = run(FleetLayout(1), requests_of(0.0, 0.0, num_prompt=512))
    assert first.ttft < 0.53 and second.ttft > 1.0
    assert (
        max(each.ttft for each in run(FleetLayout(2), requests_of(0.0, 0.0, num_prompt=512))) < 0.6
    )


def test_a_prompt_goes_where_its_blocks_are_and_is_not_computed_again() -> None:
    requests = [
        replace(request, prompt=list(range(256)))
        for request in requests_of(0.0, 1.0, 2.0, num_prompt=256)
    ]
    first, *others = run(FleetLayout(3), requests)
    assert first.ttft > 0.2 and all(other.ttft < 0.05 for other in others)


def test_decoding_waits_for_no_prompt_where_these_are_computed_elsewhere() -> None:
    """Where an engine does both, each long prompt delays the tokens of the others."""
    arrivals = [0.3 * number for number in range(8)]
    both = run(FleetLayout(2), requests_of(*arrivals, num_prompt=400, num_output=40))
    apart = run(FleetLayout(2, 1), requests_of(*arrivals, num_prompt=200, num_output=40))
    assert max(each.tpot for each in apart) < 0.02 < max(each.tpot for each in both)
    assert all(each.num_tokens == 40 for each in apart)


def test_decoding_starts_when_a_slow_link_has_carried_the_blocks() -> None:
    """Computing takes 0.128 s and the link 1.28 s for 128 tokens of 1,000 bytes."""
    slow = FleetOptionsSimulated(link_bytes_per_s=100e3)
    (request,) = run(FleetLayout(2, 1), requests_of(0.0), slow)
    assert request.ttft == pytest.approx(1.28 + 0.01, abs=0.005)
    (request,) = run(FleetLayout(2, 1), requests_of(0.0), FAST)
    assert request.ttft == pytest.approx(0.128 + 0.01, abs=0.005)


def test_a_request_that_can_never_run_says_so_and_is_not_good() -> None:
    (request,) = run(FleetLayout(1), requests_of(0.0, num_prompt=4000))
    assert request.error is not None and math.isinf(request.ttft)
    assert not Objective(2.0, 0.1).is_met(request)


def test_goodput_grows_with_machines_and_ends_where_the_objective_does() -> None:
    def make(speed: float):
        return requests_of(*(number / speed for number in range(12)), num_prompt=500)

    objective = Objective(1.0, 0.5)
    one = goodput(ENGINE, FleetLayout(1), make, objective, FAST)
    two = goodput(ENGINE, FleetLayout(2), make, objective, FAST)
    assert 1.2 < one < 3.5 and two > 1.5 * one
    never = Objective(0.1, 0.5)
    assert goodput(ENGINE, FleetLayout(2), make, never, FAST) == 0.0


def test_stages_gain_by_many_requests_and_nothing_for_one() -> None:
    """Two machines with half of the layers each, and two steps in flight."""
    (alone,) = run(FleetLayout(1, num_stages=2), requests_of(3.0))
    assert alone.ttft == pytest.approx(0.128) and alone.tpot == pytest.approx(0.01)
    many = [float(at) / 1000 for at in range(12)]
    ends = [
        max(each.end for each in run(layout, requests_of(*many, num_prompt=300, num_output=40)))
        for layout in (FleetLayout(1), FleetLayout(1, num_stages=2))
    ]
    assert ends[1] < 0.75 * ends[0]


def test_stages_hold_requests_that_one_machine_cannot() -> None:
    """A machine has 400 blocks, and a request of 7,000 tokens needs 438."""
    engine = replace(ENGINE, max_model_len=8192)
    (request,) = run(FleetLayout(1), requests_of(0.0, num_prompt=7000), engine=engine)
    assert request.error is not None
    (request,) = run(FleetLayout(1, num_stages=2), requests_of(0.0, num_prompt=7000), engine=engine)
    assert request.error is None and request.num_tokens == 5


def test_layouts_of_machines() -> None:
    assert list(map(str, list_layouts(3))) == [
        "3 x both",
        "1 x prefill + 2 x decode",
        "2 x prefill + 1 x decode",
        "1 x both in 3 stages",
    ]
    assert {layout.num_machines for layout in list_layouts(4)} == {4}
    assert [str(layout) for layout in list_layouts(4)][-2:] == [
        "2 x both in 2 stages",
        "1 x both in 4 stages",
    ]
    with pytest.raises(ConfigError, match="machines: got 0, expected 1 to 64"):
        list_layouts(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=2s", "expected ttft and tpot"),
        ("ttft=2s,tpot=80", "slo: tpot: got '80', expected a time above 0"),
        ("ttft=2s,tpot=0ms", "expected a time above 0"),
        ("ttft=2s,ttft=2s", "each once"),
        ("latency=2s", "expected ttft=TIME and tpot=TIME"),
    ],
)
def test_wrong_objectives_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective.parse(text)


def test_an_engine_is_read_from_a_recording(tmp_path: Path) -> None:
    engine = read_engine(recording(tmp_path / "log"))
    assert engine.token_bytes == 1000.0 and engine.scheduler == ENGINE.scheduler
    seconds = engine.costs.step_s(512, 0)
    assert seconds is not None and 0.4 < seconds < 0.6


def test_recordings_that_are_not_simulated_are_refused(tmp_path: Path) -> None:
    path = recording(tmp_path / "log", pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size 2 are not supported"):
        read_engine(path)
