"""Where each request's time went: what it waited for, prefill, decode, preemptions, and the batches
that it ran in.

The scheduler tells what happens. Decides nothing and reads no clock: a step's end is its beginning
plus the seconds that the executor was busy. No work is done for each request in each step: waiting
requests share one total of seconds for each reason, running ones one count of steps, and a request
remembers how these stood when it began to wait or to run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from octavo.api.outputs import Timings
from octavo.engine.protocol.requests import ON_ITS_WAY

STEP_RUNNING = "a step was running"
"""Reason of a request that arrives while a step is computed."""
ENGINE_REPLACED = "the engine was replaced"
"""Reason of a request that an earlier core knew, for all of its time before this core."""

BEFORE_PLANS = (STEP_RUNNING, ON_ITS_WAY, ENGINE_REPLACED)


class RunningSpan(NamedTuple):
    """The steps of a request between its start or return and its preemption or end."""

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
        """Seconds by reason; until it starts, what is to be taken from the totals of all
        requests.
        """
        self.started: float | None = None
        self.first_token: float | None = None
        self.since: tuple[int, int] | None = None
        """Steps, and rows in them, before it began to run; None while it does not."""
        self.spans: list[RunningSpan] = []
        self.paused: float | None = None
        """When it was preempted; None while it runs."""
        self.preempted_s = 0.0


class Timekeeper:
    """The stopwatches of all requests, told by the scheduler what happens."""

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
        """Notes that a step is planned: requests have waited until now for what they waited for."""
        if self.waits_for:
            self._waited[self.waits_for] = self._waited.get(self.waits_for, 0.0) + now - self._now
        for watch in self._arrived:
            watch.waits = {
                reason: -total for reason, total in self._waited.items()
            } | self._before_plans(watch, now)
        self._arrived.clear()
        self._now = self._end = now

    def planned(self, num_rows: int, waits_for: str) -> None:
        """Notes a plan of `num_rows` rows, and what keeps requests from starting from now on."""
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
        """Notes a new request, which the next plan considers first."""
        self._arrived.append(watch)

    def runs(self, watch: Stopwatch) -> None:
        """Notes that a request runs, for the first time or again."""
        watch.since = (self._num_steps, self._num_rows)
        if watch.paused is not None:
            watch.preempted_s += self._now - watch.paused
            watch.paused = None
        if watch.started is None:
            watch.waits = self._waits(watch)
            watch.started = self._now

    def preempted(self, watch: Stopwatch) -> None:
        """Notes that a running request lost its blocks."""
        watch.paused = self._now
        watch.spans.append(self._running_span(watch))
        watch.since = None

    def yielded(self, watch: Stopwatch) -> None:
        """Notes a request's first token."""
        watch.first_token = self._end

    def so_far(self, watch: Stopwatch) -> Timings:
        """Returns the times of a request as if it ended with the last step; the counts that the
        request itself has are left at 0.
        """
        end = max(self._end, watch.arrival, watch.started or 0.0)
        started = end if watch.started is None else watch.started
        first_token = end if watch.first_token is None else watch.first_token
        spans = watch.spans if watch.since is None else [*watch.spans, self._running_span(watch)]
        num_steps = sum(span.num_steps for span in spans)
        return Timings(
            queued_s=max(0.0, started - watch.arrival),
            prefill_s=first_token - started,
            decode_s=end - first_token,
            preempted_s=watch.preempted_s
            + (0.0 if watch.paused is None else max(0.0, end - watch.paused)),
            num_steps=num_steps,
            mean_batch_size=sum(span.num_rows for span in spans) / num_steps if num_steps else 0.0,
            max_batch_size=max((span.largest for span in spans), default=0),
            waits=self._waits(watch) if watch.started is None else watch.waits,
        )

    def _before_plans(self, watch: Stopwatch, now: float) -> dict[str, float]:
        """Returns what a request waited for until the first plan that considers it."""
        if watch.resumed:
            return {ENGINE_REPLACED: max(0.0, now - watch.arrival)}
        running_s = max(0.0, min(self._end, now) - watch.arrival)
        return {STEP_RUNNING: running_s, ON_ITS_WAY: max(0.0, now - watch.arrival - running_s)}

    def _waits(self, watch: Stopwatch) -> dict[str, float]:
        """Returns the seconds by reason of a request that has not started."""
        if watch in self._arrived:
            return {}
        found = {
            reason: total + watch.waits.get(reason, 0.0) for reason, total in self._waited.items()
        }
        found |= {reason: watch.waits[reason] for reason in BEFORE_PLANS if reason in watch.waits}
        return {reason: seconds for reason, seconds in found.items() if seconds > 0}

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
