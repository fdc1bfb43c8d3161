"""Timings of requests: queue time by reason, prefill, decode, preemptions, and batch sizes.

Reads no clock: a step ends at its start plus the executor's busy time. Costs nothing per request
and step: waiting requests share total seconds by reason, running ones a count of steps; each
request stores the totals at the time when it started to wait or run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from octavo.api.outputs import Timings
from octavo.engine.protocol.requests import ON_ITS_WAY

STEP_RUNNING = "waiting for the running step"
"""Reason for the wait of a request that arrives while a step is computed."""
ENGINE_REPLACED = "the engine was restarted"
"""Reason for the time that a request spent in an earlier core."""

BEFORE_PLANS = (STEP_RUNNING, ON_ITS_WAY, ENGINE_REPLACED)


class RunningSpan(NamedTuple):
    """Steps of a request between its start and its preemption or end."""

    num_steps: int
    num_rows: int
    """Total number of rows in the span's steps, of all requests."""
    largest: int
    """Number of rows in the span's largest step."""


class Stopwatch:
    """Times of one request so far, in seconds and as times on the scheduler's clock."""

    __slots__ = (
        "arrival",
        "first_token",
        "paused",
        "preempted_s",
        "resumed",
        "since",
        "spans",
        "started",
        "waits",
    )

    def __init__(self, arrival: float, *, resumed: bool = False) -> None:
        self.arrival = arrival
        self.resumed = resumed
        self.waits: dict[str, float] = {}
        """Seconds by reason; before the start, minus the totals at its arrival."""
        self.started: float | None = None
        self.first_token: float | None = None
        self.since: tuple[int, int] | None = None
        """Numbers of steps and of their rows before it started to run; None while it does not
        run.
        """
        self.spans: list[RunningSpan] = []
        self.paused: float | None = None
        """Time of its preemption; None while it runs."""
        self.preempted_s = 0.0


class Timekeeper:
    """Measures the times of all requests."""

    def __init__(self) -> None:
        self._now = 0.0
        self._end = 0.0
        self._begun: deque[tuple[float, int]] = deque()
        """Scheduling time and number of rows of each plan in flight."""
        self._computed_until = 0.0
        """End of the last completed step; the device continues from there if the next step was
        already scheduled.
        """
        self.waits_for = ""
        """Reason why requests did not start in the last plan; "" if none waits."""
        self._waited: dict[str, float] = {}
        """Seconds that any request waited, by reason."""
        self._arrived: list[Stopwatch] = []
        self._num_steps = 0
        self._num_rows = 0
        """Number of scheduled steps, and of their rows."""
        self._num_steps_done = 0
        self._num_rows_done = 0
        """Number of computed steps, and of their rows."""
        self._peaks: list[tuple[int, int]] = []
        """(step, number of rows) with decreasing numbers of rows: from any step on, the largest
        batch is the first entry at or after that step.
        """

    # -- steps -------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> None:
        """Begins to schedule a step at time `now`: adds the seconds that requests have waited until
        then.
        """
        if self.waits_for:
            self._waited[self.waits_for] = self._waited.get(self.waits_for, 0.0) + now - self._now
        for stopwatch in self._arrived:
            for reason, total in self._waited.items():
                stopwatch.waits[reason] = -total
            since_arrival_s = max(0.0, now - stopwatch.arrival)
            if stopwatch.resumed:
                stopwatch.waits[ENGINE_REPLACED] = since_arrival_s
            else:
                running_s = max(0.0, min(self._end, now) - stopwatch.arrival)
                stopwatch.waits[STEP_RUNNING] = running_s
                stopwatch.waits[ON_ITS_WAY] = max(0.0, now - stopwatch.arrival - running_s)
        self._arrived.clear()
        self._now = self._end = now

    def planned(self, num_rows: int, waits_for: str) -> None:
        """Counts a scheduled plan of `num_rows` rows; `waits_for` is the reason why waiting
        requests did not start.
        """
        self.waits_for = waits_for
        self._begun.append((self._now, num_rows))
        if num_rows == 0:
            return
        while self._peaks and self._peaks[-1][1] <= num_rows:
            self._peaks.pop()
        self._peaks.append((self._num_steps, num_rows))
        self._num_steps += 1
        self._num_rows += num_rows

    def repeated(self, busy_s: float, num_rows: int) -> None:
        """Counts one more decode step of the last plan, of `num_rows` rows."""
        self._end = self._computed_until = self._computed_until + busy_s
        self._num_steps += 1
        self._num_rows += num_rows
        self._num_steps_done += 1
        self._num_rows_done += num_rows

    def computed(self, busy_s: float) -> None:
        """Counts the oldest plan in flight, whose first step has been computed."""
        begun, num_rows = self._begun.popleft()
        self._end = self._computed_until = max(begun, self._computed_until) + busy_s
        if num_rows:
            self._num_steps_done += 1
            self._num_rows_done += num_rows

    # -- requests ----------------------------------------------------------------------------------

    def arrived(self, stopwatch: Stopwatch) -> None:
        """Adds a new request."""
        self._arrived.append(stopwatch)

    def runs(self, stopwatch: Stopwatch) -> None:
        """Marks a request as running, for the first time or again."""
        stopwatch.since = (self._num_steps, self._num_rows)
        if stopwatch.paused is not None:
            stopwatch.preempted_s += self._now - stopwatch.paused
            stopwatch.paused = None
        if stopwatch.started is None:
            stopwatch.waits = self._waits(stopwatch)
            stopwatch.started = self._now

    def preempted(self, stopwatch: Stopwatch) -> None:
        """Marks a running request as preempted."""
        stopwatch.paused = self._now
        stopwatch.spans.append(self._running_span(stopwatch))
        stopwatch.since = None

    def record_first_token(self, stopwatch: Stopwatch) -> None:
        """Sets the time of a request's first token."""
        stopwatch.first_token = self._end

    def get_timings(self, stopwatch: Stopwatch) -> Timings:
        """Returns the times of a request as if it ended with the last step. The counts that the
        request tracks itself are 0.
        """
        end = max(self._end, stopwatch.arrival, stopwatch.started or 0.0)
        started = end if stopwatch.started is None else stopwatch.started
        first_token = end if stopwatch.first_token is None else stopwatch.first_token
        spans = (
            stopwatch.spans
            if stopwatch.since is None
            else [*stopwatch.spans, self._running_span(stopwatch)]
        )
        num_steps = num_rows = largest = 0
        for span in spans:
            num_steps += span.num_steps
            num_rows += span.num_rows
            largest = max(largest, span.largest)
        return Timings(
            queued_s=max(0.0, started - stopwatch.arrival),
            prefill_s=first_token - started,
            decode_s=end - first_token,
            preempted_s=stopwatch.preempted_s
            + (0.0 if stopwatch.paused is None else max(0.0, end - stopwatch.paused)),
            num_steps=num_steps,
            mean_batch_size=num_rows / num_steps if num_steps else 0.0,
            max_batch_size=largest,
            waits=self._waits(stopwatch) if stopwatch.started is None else stopwatch.waits,
        )

    def _waits(self, stopwatch: Stopwatch) -> dict[str, float]:
        """Returns the seconds by reason of a request that has not started."""
        if stopwatch in self._arrived:
            return {}
        waits: dict[str, float] = {}
        for reason, total in self._waited.items():
            seconds = total + stopwatch.waits.get(reason, 0.0)
            if seconds > 0:
                waits[reason] = seconds
        for reason in BEFORE_PLANS:
            seconds = stopwatch.waits.get(reason, 0.0)
            if seconds > 0:
                waits[reason] = seconds
        return waits

    def _running_span(self, stopwatch: Stopwatch) -> RunningSpan:
        """Returns the span of a running request up to the last computed step."""
        assert stopwatch.since is not None
        first_step, rows_before = stopwatch.since
        if self._num_steps_done <= first_step:
            return RunningSpan(0, 0, 0)
        largest = self._peaks[bisect_left(self._peaks, (first_step, 0))][1]
        return RunningSpan(
            self._num_steps_done - first_step, self._num_rows_done - rows_before, largest
        )
