"""The heartbeat page, read through another mapping as a front reads it."""

import tempfile
import time

import pytest

from octavo.engine.clients.heartbeat import (
    HEARTBEAT_INTERVAL_S,
    PAGE_BYTES,
    HeartbeatPage,
    HeartbeatThread,
    MonitoredExecutor,
)
from octavo.engine.protocol.step import ScheduledRequest, StepPlan, StepResult


@pytest.fixture
def page():
    with tempfile.TemporaryFile() as file:
        file.write(bytes(PAGE_BYTES))
        file.flush()
        yield file.fileno()


class ReadingExecutor:
    """An executor that reads the page from outside while it computes."""

    progress = 0

    def __init__(self, page):
        self.outside = HeartbeatPage(page)
        self.seen = None

    def execute(self, plan):
        self.seen = self.outside.step_requests()
        if plan.step:
            raise RuntimeError("no luck")
        return StepResult(plan.step, [])

    def close(self):
        pass


def plan_of(step, *rows):
    return StepPlan(step, [], [], [], list(rows))


def test_the_page_names_the_requests_of_the_step_that_runs(page):
    """All beams of a search appear as one request."""
    executor = ReadingExecutor(page)
    monitored = MonitoredExecutor(executor, HeartbeatPage(page))
    rows = [
        ScheduledRequest("a", 0, 1, []),
        ScheduledRequest("b/1", 0, 1, [], search_of="b"),
        ScheduledRequest("b/2", 0, 1, [], search_of="b"),
    ]
    before = executor.outside.beats
    monitored.execute(plan_of(0, *rows))
    assert (
        executor.seen == ["a", "b"]
        and executor.outside.step_requests() == []
        and executor.outside.beats == before + 2
    )
    with pytest.raises(RuntimeError):
        monitored.execute(plan_of(1, *rows))
    assert executor.outside.step_requests() == [], "a step that raises has ended too"


def test_names_that_have_no_room_are_left_out(page):
    heartbeat = HeartbeatPage(page)
    heartbeat.begin_step(["x" * 200] * 1000)
    assert heartbeat.step_requests() == []
    heartbeat.begin_step(["x" * 200] * 300)
    assert len(heartbeat.step_requests()) == 300


def test_the_thread_beats_for_a_step_that_makes_progress_and_for_no_other(page):
    executor, heartbeat = ReadingExecutor(page), HeartbeatPage(page)
    thread = HeartbeatThread(executor, heartbeat)
    thread.wake()
    time.sleep(3 * HEARTBEAT_INTERVAL_S)
    still = heartbeat.beats
    time.sleep(3 * HEARTBEAT_INTERVAL_S)
    assert heartbeat.beats == still
    executor.progress += 1
    time.sleep(4 * HEARTBEAT_INTERVAL_S)
    assert heartbeat.beats == still + 1
    thread.rest()
    time.sleep(2 * HEARTBEAT_INTERVAL_S)
    executor.progress += 1
    time.sleep(3 * HEARTBEAT_INTERVAL_S)
    assert heartbeat.beats == still + 1, "it sleeps"
    thread.close()
