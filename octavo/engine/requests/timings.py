"""Timings of requests: queue time by reason, prefill, decode, preemptions, and batch sizes.

Reads no clock: a step's end is its start plus the executor's busy time. There is no work per
request and step: waiting requests share totals of seconds by reason, running ones a count of steps,
and each request stores the totals at the time when it began to wait or run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from octavo.api.outputs import Timings
from octavo.engine.protocol.requests import ON_ITS_WAY

STEP_RUNNING = "waiting for the running step"
"""Reason of a request that arrives while a step is computed."""
ENGINE_REPLACED = "the engine was restarted"
"""Reason of a request that an earlier core knew, for all of its time before this core."""

BEFORE_PLANS = (STEP_RUNNING, ON_ITS_WAY, ENGINE_REPLACED)


class RunningSpan(NamedTuple):
    """Steps of a request between its start and its preemption or end."""

    num_steps: int
    num_rows: int
    """Rows of all requests in the span's steps together."""
    largest: int
    """Rows of all requests in the span's largest step."""


class Stopwatch:
    """One request's times so far, in seconds and moments on the scheduler's clock."""

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
        """Seconds by reason; until it starts, minus the totals at its arrival."""
        self.started: float | None = None
        self.first_token: float | None = None
        self.since: tuple[int, int] | None = None
        """Steps, and rows in them, before it began to run; None while it does not."""
        self.spans: list[RunningSpan] = []
        self.paused: float | None = None
        """When it was preempted; None while it runs."""
        self.preempted_s = 0.0


class Timekeeper:
    """Measures the times of all requests."""

    def __init__(self) -> None:
        self._now = 0.0
        self._end = 0.0
        self._begun: deque[tuple[float, int]] = deque()
        """When each plan in flight was made, and its rows."""
        self._computed_until = 0.0
        """End of the last step that came back; the device goes on from there where the next one was
        planned before.
        """
        self.waits_for = ""
        """Reason why requests did not start in the last plan; "" where none waits."""
        self._waited: dict[str, float] = {}
        """Seconds that any request waited, by reason."""
        self._arrived: list[Stopwatch] = []
        self._num_steps = 0
        self._num_rows = 0
        """Steps planned, and their rows."""
        self._num_steps_done = 0
        self._num_rows_done = 0
        """Steps computed, and their rows."""
        self._peaks: list[tuple[int, int]] = []
        """Steps and their rows, as (step, rows) with falling rows: from any step on, the largest
        batch is that of the first entry not before it.
        """

    # -- steps -------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> None:
        """Starts scheduling a step: adds the seconds that requests have waited until now."""
        if self.waits_for:
            self._waited[self.waits_for] = self._waited.get(self.waits_for, 0.0) + now - self._now
        for watch in self._arrived:
            for reason, total in self._waited.items():
                watch.waits[reason] = -total
            since_arrival_s = max(0.0, now - watch.arrival)
            if watch.resumed:
                watch.waits[ENGINE_REPLACED] = since_arrival_s
            else:
                running_s = max(0.0, min(self._end, now) - watch.arrival)
                watch.waits[STEP_RUNNING] = running_s
                watch.waits[ON_ITS_WAY] = max(0.0, now - watch.arrival - running_s)
        self._arrived.clear()
        self._now = self._end = now

    def planned(self, num_rows: int, waits_for: str) -> None:
        """Counts a plan of `num_rows` rows; `waits_for` is why waiting requests did not start."""
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

    def arrived(self, watch: Stopwatch) -> None:
        """Adds a new request."""
        self._arrived.append(watch)

    def runs(self, watch: Stopwatch) -> None:
        """Marks a request as running, for the first time or again."""
        watch.since = (self._num_steps, self._num_rows)
        if watch.paused is not None:
            watch.preempted_s += self._now - watch.paused
            watch.paused = None
        if watch.started is None:
            watch.waits = self._waits(watch)
            watch.started = self._now

    def preempted(self, watch: Stopwatch) -> None:
        """Marks a running request as preempted."""
        watch.paused = self._now
        watch.spans.append(self._running_span(watch))
        watch.since = None

    def record_first_token(self, watch: Stopwatch) -> None:
        """Sets the time of a request's first token."""
        watch.first_token = self._end

    def get_timings(self, watch: Stopwatch) -> Timings:
        """Returns the times of a request as if it ended with the last step; counts that the request
        itself has are 0.
        """
        end = max(self._end, watch.arrival, watch.started or 0.0)
        started = end if watch.started is None else watch.started
        first_token = end if watch.first_token is None else watch.first_token
        spans = watch.spans if watch.since is None else [*watch.spans, self._running_span(watch)]
        num_steps = num_rows = largest = 0
        for span in spans:
            num_steps += span.num_steps
            num_rows += span.num_rows
            largest = max(largest, span.largest)
        return Timings(
            queued_s=max(0.0, started - watch.arrival),
            prefill_s=first_token - started,
            decode_s=end - first_token,
            preempted_s=watch.preempted_s
            + (0.0 if watch.paused is None else max(0.0, end - watch.paused)),
            num_steps=num_steps,
            mean_batch_size=num_rows / num_steps if num_steps else 0.0,
            max_batch_size=largest,
            waits=self._waits(watch) if watch.started is None else watch.waits,
        )

    def _waits(self, watch: Stopwatch) -> dict[str, float]:
        """Returns the seconds by reason of a request that has not started."""
        if watch in self._arrived:
            return {}
        found: dict[str, float] = {}
        for reason, total in self._waited.items():
            seconds = total + watch.waits.get(reason, 0.0)
            if seconds > 0:
                found[reason] = seconds
        for reason in BEFORE_PLANS:
            seconds = watch.waits.get(reason, 0.0)
            if seconds > 0:
                found[reason] = seconds
        return found

    def _running_span(self, watch: Stopwatch) -> RunningSpan:
        """Returns the span of a running request up to the last step computed."""
        assert watch.since is not None
        first_step, rows_before = watch.since
        if self._num_steps_done <= first_step:
            return RunningSpan(0, 0, 0)
        largest = self._peaks[bisect_left(self._peaks, (first_step, 0))][1]
        return RunningSpan(
            self._num_steps_done - first_step, self._num_rows_done - rows_before, largest
        )
