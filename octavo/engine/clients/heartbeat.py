"""Heartbeat of the core: a page of shared memory that the frontend can read even if the core hangs
or has died.

The core writes the ids of a step's requests before it computes them. It increments a counter with
each step, and during a long step whenever the executor has made progress. The reader decides how
long the counter may stay unchanged (`watchdog.py`).
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from octavo.engine.protocol.ports import AsyncExecutor, DecodingExecutor, Executor, Launched
from octavo.engine.protocol.step import StepPlan, StepResult

PAGE_BYTES = 1 << 16
NUMBER_BYTES = 8
"""Size of each of the page's two leading integers: the counter, and the number of bytes of request
ids.
"""
NAMES_AT = 2 * NUMBER_BYTES
"""Offset of the msgpack list of request ids."""

HEARTBEAT_INTERVAL_S = 0.25
"""Interval at which a running step is checked for progress, in seconds."""


class HeartbeatPage:
    """The shared page, written by the core's process and read by the frontend's.

    `fd` is a file of PAGE_BYTES, which each process maps.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)

    @property
    def beats(self) -> int:
        """Counter that increases whenever the core makes progress."""
        return self._number(0)

    def beat(self) -> None:
        self._set_number(0, self.beats + 1)

    def begin_step(self, request_ids: Sequence[str]) -> None:
        """Writes the request ids of a starting step, or none if they do not fit on the page."""
        names = msgspec.msgpack.encode(request_ids)
        if len(names) > PAGE_BYTES - NAMES_AT:
            names = b""
        self._page[NAMES_AT : NAMES_AT + len(names)] = names
        self._set_number(1, len(names))
        self.beat()

    def end_step(self) -> None:
        self._set_number(1, 0)
        self.beat()

    def step_requests(self) -> list[str]:
        """Returns the request ids of the step in progress; [] between steps, or if they did not fit
        on the page.
        """
        names = self._page[NAMES_AT : NAMES_AT + self._number(1)]
        return msgspec.msgpack.decode(names, type=list[str]) if names else []

    def _number(self, index: int) -> int:
        at = index * NUMBER_BYTES
        return int.from_bytes(self._page[at : at + NUMBER_BYTES], "little")

    def _set_number(self, index: int, value: int) -> None:
        at = index * NUMBER_BYTES
        self._page[at : at + NUMBER_BYTES] = value.to_bytes(NUMBER_BYTES, "little")


class MonitoredExecutor:
    """Executor that publishes each step on the heartbeat page while computing it.

    Implements `ports.AsyncExecutor` and `ports.DecodingExecutor` if the wrapped executor does.
    """

    def __init__(self, executor: Executor, page: HeartbeatPage) -> None:
        self._executor = executor
        self._page = page
        self._launched: deque[list[str]] = deque()
        """Request ids of each in-flight step, oldest first; the device computes the first one."""

    @property
    def progress(self) -> int:
        return self._executor.progress

    def execute(self, plan: StepPlan) -> StepResult:
        self._page.begin_step(_get_requests(plan))
        try:
            return self._executor.execute(plan)
        finally:
            self._page.end_step()

    def decode(self, plan: StepPlan) -> Generator[StepResult]:
        results = cast("DecodingExecutor", self._executor).decode(plan)
        while True:
            self._page.begin_step(_get_requests(plan))
            try:
                result = next(results, None)
            finally:
                self._page.end_step()
            if result is None:
                return
            yield result

    def launch(self, plan: StepPlan) -> Launched:
        assert isinstance(self._executor, AsyncExecutor)
        self._launched.append(_get_requests(plan))
        self._page.begin_step(self._launched[0])
        try:
            return MonitoredStep(self._executor.launch(plan), self._note_return)
        except BaseException:
            self._launched.pop()
            self._show_oldest()
            raise

    def _note_return(self) -> None:
        self._launched.popleft()
        self._show_oldest()

    def _show_oldest(self) -> None:
        if self._launched:
            self._page.begin_step(self._launched[0])
        else:
            self._page.end_step()

    def close(self) -> None:
        self._executor.close()


@dataclass(frozen=True, slots=True)
class MonitoredStep:
    """A launched step, removed from the heartbeat page when its result is received.

    Implements `ports.Launched`.
    """

    step: Launched
    note_return: Callable[[], None]

    def result(self) -> StepResult:
        try:
            return self.step.result()
        finally:
            self.note_return()


def _get_requests(plan: StepPlan) -> list[str]:
    """Returns the ids of the step's requests without duplicates; all beams of a beam search have
    one request id.
    """
    return list(dict.fromkeys(row.owner for row in plan.rows))


class HeartbeatThread:
    """Thread that increments the counter during a long step as long as its executor makes progress.

    Sleeps while there is no work.
    """

    def __init__(self, executor: Executor, page: HeartbeatPage) -> None:
        self._executor = executor
        self._page = page
        self._busy = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-heartbeat", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Starts the periodic checks when there is work."""
        self._busy.set()

    def rest(self) -> None:
        """Stops the periodic checks when there is no work."""
        self._busy.clear()

    def close(self) -> None:
        self._closed.set()
        self._busy.set()
        self._thread.join()

    def _run(self) -> None:
        beats = progress = -1
        while self._busy.wait() and not self._closed.wait(HEARTBEAT_INTERVAL_S):
            # Short steps increment the counter themselves; only a long step needs this thread.
            if self._page.beats == beats and self._executor.progress != progress:
                progress = self._executor.progress
                self._page.beat()
            beats = self._page.beats
