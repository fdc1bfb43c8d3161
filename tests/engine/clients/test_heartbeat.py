"""What a core writes down of itself, read by another mapping of the same page."""

import tempfile
import time

import pytest

from octavo.engine.clients.heartbeat import PAGE_BYTES, PULSE_S, Pulse, Slate, Watched
from octavo.step import ScheduledRow, StepPlan, StepResult


@pytest.fixture
def page():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(PAGE_BYTES))
        file.flush()
        yield file.fileno()


class Looking:
    """An executor that looks at the slate from outside while it computes."""

    progress = 0

    def __init__(self, page):
        self.outside = Slate(page)
        self.seen = None

    def execute(self, plan, between=None):
        self.seen = self.outside.read()
        if plan.step:
            raise RuntimeError("no luck")
        return StepResult(plan.step, [])

    def close(self):
        pass


def plan_of(step, *rows):
    return StepPlan(step, [], [], [], list(rows))


def test_requests_of_the_step_that_runs(page):
    """The beams of a search are one request."""
    executor = Looking(page)
    watched = Watched(executor, Slate(page))
    rows = [
        ScheduledRow("a", 0, 1, []),
        ScheduledRow("b/1", 0, 1, [], search_of="b"),
        ScheduledRow("b/2", 0, 1, [], search_of="b"),
    ]
    before = executor.outside.beats
    watched.execute(plan_of(0, *rows))
    assert (
        executor.seen == ["a", "b"]
        and executor.outside.read() == []
        and executor.outside.beats == before + 2
    )
    with pytest.raises(RuntimeError):
        watched.execute(plan_of(1, *rows))
    assert executor.outside.read() == [], "a step that raises has ended too"


def test_names_that_have_no_room_are_left_out(page):
    slate = Slate(page)
    slate.begin(["x" * 200] * 1000)
    assert slate.read() == []
    slate.begin(["x" * 200] * 300)
    assert len(slate.read()) == 300


def test_the_pulse_beats_for_a_step_that_gets_ahead_and_for_no_other(page):
    executor, slate = Looking(page), Slate(page)
    pulse = Pulse(executor, slate)
    pulse.wake()
    time.sleep(3 * PULSE_S)
    still = slate.beats
    time.sleep(3 * PULSE_S)
    assert slate.beats == still
    executor.progress += 1
    time.sleep(4 * PULSE_S)
    assert slate.beats == still + 1
    pulse.rest()
    time.sleep(2 * PULSE_S)
    executor.progress += 1
    time.sleep(3 * PULSE_S)
    assert slate.beats == still + 1, "it sleeps"
    pulse.close()
