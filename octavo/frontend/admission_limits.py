"""Admission limits of a frontend: on the requests and prompt tokens in the queue, and on predicted
latencies; counts rejected requests.

Computes the queue from the requests that were sent and the core's counters (EngineStats), without a
round trip. A rejected client is told when to retry, based on the rate at which requests recently
left the queue. Reads no clock itself.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.api.errors import InvalidRequest, Overloaded
from octavo.config.engine_config import EngineConfig
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.engine.protocol.requests import BACKGROUND_PRIORITY
from octavo.engine.protocol.stats import EngineStats
from octavo.frontend.input_processor import ParentRequest
from octavo.frontend.latency_limit import LatencyLimit

MEASURED_S = 10.0
"""Period over which the rate is measured, in seconds."""
SAMPLE_S = 0.5
"""Interval between two samples of the queue's counts, in seconds."""
UNKNOWN_S = 1.0
"""Recommended wait in seconds while no rate is known."""
MAX_S = 300.0
"""Maximum recommended wait, in seconds."""


@dataclass(frozen=True, slots=True)
class Size:
    """Number of requests, and of their prompt tokens."""

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.requests + other.requests, self.tokens + other.tokens)

    def __sub__(self, other: Size) -> Size:
        return Size(self.requests - other.requests, self.tokens - other.tokens)


class QueueLimit:
    """Queue limits `max_num_queued_reqs` and `max_num_queued_tokens`. Requests beyond them are
    rejected with Overloaded.
    """

    def __init__(self, options: SchedulerOptions, *, num_engines: int = 1) -> None:
        self._max_reqs = options.max_num_queued_reqs
        self._max_tokens = options.max_num_queued_tokens
        self._max_running = options.max_num_seqs * num_engines
        self._sent = Size()
        self._stats = EngineStats()
        self._left: deque[tuple[float, Size]] = deque()
        """Times of the last seconds, each with the total size of the requests that had left the
        queue.
        """

    def sent(self, size: Size) -> None:
        """Counts requests that were sent to the core."""
        self._sent += size

    def update(self, stats: EngineStats, now: float) -> None:
        """Updates the limit by the core's counters after a step."""
        self._stats = stats
        if not self._left or now - self._left[-1][0] >= SAMPLE_S:
            self._left.append((now, _added(stats) - _waiting(stats)))
        while now - self._left[0][0] > MEASURED_S and len(self._left) > 2:
            self._left.popleft()

    def check(self, more: Size, *, num_unfinished: int, now: float) -> None:
        """Raises Overloaded if `more` requests may not be sent now, InvalidRequest if they never
        may. Requests that can run at once do not count as waiting.

        `num_unfinished`: number of the frontend's requests, without requests aborted since the last
        step (the core still counts these).
        """
        max_reqs = self._max_running + self._max_reqs
        if more.requests > max_reqs:
            hint = "request fewer samples, or raise max_num_queued_reqs"
            raise InvalidRequest(
                f"n: got {more.requests}, expected at most {max_reqs} (running and waiting"
                " requests)",
                param="n",
                hint=hint,
            )
        waiting = _waiting(self._stats) + self._sent - _added(self._stats)
        num_waiting = min(waiting.requests, num_unfinished)
        num_places = max(0, self._max_running - self._stats.num_running - self._stats.num_swapped)
        excess = num_waiting + more.requests - num_places - self._max_reqs
        if excess > 0:
            what = f"{max(0, num_waiting - num_places)} requests are waiting"
            raise self._overloaded(
                what, "max_num_queued_reqs", self._max_reqs, Size(requests=excess), now
            )
        if self._max_tokens is not None and num_waiting + more.requests > num_places:
            excess = waiting.tokens + more.tokens - self._max_tokens
            if excess > 0 and num_waiting:
                what = f"{waiting.tokens} tokens are waiting"
                raise self._overloaded(
                    what, "max_num_queued_tokens", self._max_tokens, Size(tokens=excess), now
                )

    def _overloaded(
        self, what: str, option: str, allowed: int, excess: Size, now: float
    ) -> Overloaded:
        return Overloaded(
            f"the queue is full: {what}, expected at most {allowed}",
            hint=f"try again later, or raise {option}",
            retry_after_s=self._retry_after_s(excess, now),
        )

    def _retry_after_s(self, excess: Size, now: float) -> float:
        """Returns the seconds until the excess has left the queue at the recent rate; if nothing
        left recently, the length of the measured period.
        """
        if not self._left or now <= self._left[0][0]:
            return UNKNOWN_S
        since, earlier = self._left[0]
        left, elapsed_s = _added(self._stats) - _waiting(self._stats) - earlier, now - since
        needed_s = [
            elapsed_s * excess_count / num_left if num_left > 0 else max(UNKNOWN_S, elapsed_s)
            for excess_count, num_left in (
                (excess.requests, left.requests),
                (excess.tokens, left.tokens),
            )
            if excess_count > 0
        ]
        return min(max(needed_s, default=UNKNOWN_S), MAX_S)


def _added(stats: EngineStats) -> Size:
    return Size(stats.num_added, stats.num_added_tokens)


def _waiting(stats: EngineStats) -> Size:
    return Size(stats.num_waiting, stats.num_waiting_tokens)


class AdmissionLimits:
    """Limits on the queue and on predicted latencies of one engine. Times are from `clock`."""

    def __init__(self, config: EngineConfig) -> None:
        num_engines = config.fleet.data_parallel_size
        self._queue = QueueLimit(config.scheduler, num_engines=num_engines)
        self._latency = LatencyLimit(config.scheduler, num_engines=num_engines)
        self.rejections: Counter[str] = Counter()
        """Number of rejected requests by limit: queue or latency."""

    def check_room(self, num_samples: int, *, num_unfinished: int) -> None:
        """Raises Overloaded if the queue has no room for a request whose body has not been read
        yet.
        """
        with self._counting("queue"):
            self._queue.check(
                Size(num_samples), num_unfinished=num_unfinished, now=time.monotonic()
            )

    def check(self, request: ParentRequest, *, num_unfinished: int) -> None:
        """Raises Overloaded if the queue is full or a predicted latency exceeds its limit."""
        now = time.monotonic()
        with self._counting("queue"):
            self._queue.check(_size(request), num_unfinished=num_unfinished, now=now)
        if not _is_background(request):
            with self._counting("latency"):
                self._latency.check(len(request.prompt_token_ids), len(request.samples), now)

    def sent(self, request: ParentRequest) -> None:
        """Counts a request that was sent to the core."""
        self._queue.sent(_size(request))
        if not _is_background(request):
            self._latency.sent(request, time.monotonic())

    def update(self, step: CoreOutputs) -> None:
        """Updates the limits by a step's outputs."""
        now = time.monotonic()
        self._queue.update(step.stats, now)
        self._latency.update(step.outputs, step.stats, step.costs, now)

    @contextmanager
    def _counting(self, limit: str) -> Iterator[None]:
        try:
            yield
        except Overloaded:
            self.rejections[limit] += 1
            raise


def _size(request: ParentRequest) -> Size:
    return Size(len(request.samples), len(request.samples) * len(request.prompt_token_ids))


def _is_background(request: ParentRequest) -> bool:
    """Returns whether a request has background priority, so that it delays no other request."""
    return request.origin.priority == BACKGROUND_PRIORITY
