"""All limits that a front sets to what it takes in, and how often each has refused something."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.config.engine_config import EngineConfig
from octavo.engine.core import CoreOutputs
from octavo.engine.front.input_processor import FrontRequest
from octavo.engine.front.latency_limit import LatencyLimit
from octavo.engine.front.queue_limit import QueueLimit, Size
from octavo.engine.requests.request import BACKGROUND_PRIORITY
from octavo.errors import Overloaded


class AdmissionLimits:
    """The limits of one engine's queue and of its predicted latencies; times are the clock's."""

    def __init__(self, config: EngineConfig) -> None:
        num_engines = config.fleet.data_parallel_size
        self._queue = QueueLimit(config.scheduler, num_engines=num_engines)
        self._latency = LatencyLimit(config.scheduler, num_engines=num_engines)
        self.rejections: Counter[str] = Counter()
        """Requests that were refused, by the limit: queue or latency."""

    def check_room(self, num_samples: int, *, num_unfinished: int) -> None:
        """Raises Overloaded where the queue has no room for a request that is not read yet."""
        with self._counting("queue"):
            self._queue.check(
                Size(num_samples), num_unfinished=num_unfinished, now=time.monotonic()
            )

    def check(self, request: FrontRequest, *, num_unfinished: int) -> None:
        """Raises Overloaded where a request is too many, or would be too late."""
        now = time.monotonic()
        with self._counting("queue"):
            self._queue.check(_size(request), num_unfinished=num_unfinished, now=now)
        if not _is_background(request):
            with self._counting("latency"):
                self._latency.check(len(request.prompt_token_ids), len(request.samples), now)

    def sent(self, request: FrontRequest) -> None:
        """Counts a request that was given to the core."""
        self._queue.sent(_size(request))
        if not _is_background(request):
            self._latency.sent(request, time.monotonic())

    def take(self, step: CoreOutputs) -> None:
        """Takes in what a step yielded."""
        now = time.monotonic()
        self._queue.take(step.stats, now)
        self._latency.take(step.outputs, step.stats, step.costs, now)

    @contextmanager
    def _counting(self, limit: str) -> Iterator[None]:
        try:
            yield
        except Overloaded:
            self.rejections[limit] += 1
            raise


def _size(request: FrontRequest) -> Size:
    return Size(len(request.samples), len(request.samples) * len(request.prompt_token_ids))


def _is_background(request: FrontRequest) -> bool:
    """Tells whether a request goes behind all others, and so delays none."""
    return request.origin.priority == BACKGROUND_PRIORITY
