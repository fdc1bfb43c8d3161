"""What a core is doing, written where its front can read it though the core hangs: a page of memory
that both processes map.

The core notes the requests of a step before it computes them, and counts up whenever it has moved
on: with each step, and within a long one as long as the executor gets ahead. What standing still
means is the reader's business.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from octavo.ports import AsyncExecutor, Between, Executor, Launched
from octavo.step import StepPlan, StepResult

PAGE_BYTES = 1 << 16
COUNT_BYTES = 8
"""Of the two numbers at its beginning: how often anything moved on, and the bytes of the names
after them.
"""
NAMES_AT = 2 * COUNT_BYTES

PULSE_S = 0.25
"""So often a step is looked at that has not ended."""


class Slate:
    """Written by one process, read by another; the file descriptor is of a file of PAGE_BYTES."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES)

    @property
    def beats(self) -> int:
        """Changes whenever the core has moved on."""
        return self._number(0)

    def beat(self) -> None:
        self._set(0, self.beats + 1)

    def begin(self, request_ids: Sequence[str]) -> None:
        """A step that computes these. Names that have no room are left out, all of them."""
        names = msgspec.msgpack.encode(request_ids)
        if len(names) > PAGE_BYTES - NAMES_AT:
            names = b""
        self._page[NAMES_AT : NAMES_AT + len(names)] = names
        self._set(1, len(names))
        self.beat()

    def end(self) -> None:
        self._set(1, 0)
        self.beat()

    def read(self) -> list[str]:
        """The requests of the step that has begun and not ended; [] where there is none, or nobody
        knows.
        """
        names = self._page[NAMES_AT : NAMES_AT + self._number(1)]
        return msgspec.msgpack.decode(names, type=list[str]) if names else []

    def _number(self, index: int) -> int:
        return int.from_bytes(self._page[index * COUNT_BYTES : (index + 1) * COUNT_BYTES], "little")

    def _set(self, index: int, value: int) -> None:
        self._page[index * COUNT_BYTES : (index + 1) * COUNT_BYTES] = value.to_bytes(
            COUNT_BYTES, "little"
        )


class Watched:
    """An executor whose steps stand on a slate while they are computed, one at a time. Implements
    `ports.AsyncExecutor` where it is one.
    """

    def __init__(self, executor: Executor, slate: Slate) -> None:
        self._executor = executor
        self._slate = slate
        self._launched: deque[list[str]] = deque()
        """The requests of steps that have not come back; the first is the one that computes."""

    @property
    def progress(self) -> int:
        return self._executor.progress

    def execute(self, plan: StepPlan, between: Between | None = None) -> StepResult:
        self._slate.begin(_requests_of(plan))
        try:
            return self._executor.execute(plan, between)
        finally:
            self._slate.end()

    def launch(self, plan: StepPlan) -> Launched:
        assert isinstance(self._executor, AsyncExecutor)
        self._launched.append(_requests_of(plan))
        self._slate.begin(self._launched[0])
        try:
            return WatchedStep(self._executor.launch(plan), self._came_back)
        except BaseException:
            self._launched.pop()
            self._show()
            raise

    def _came_back(self) -> None:
        self._launched.popleft()
        self._show()

    def _show(self) -> None:
        if self._launched:
            self._slate.begin(self._launched[0])
        else:
            self._slate.end()

    def close(self) -> None:
        self._executor.close()


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """Implements `ports.Launched`."""

    step: Launched
    came_back: Callable[[], None]

    def result(self) -> StepResult:
        try:
            return self.step.result()
        finally:
            self.came_back()


def _requests_of(plan: StepPlan) -> list[str]:
    return list(dict.fromkeys(row.owner for row in plan.rows))


class Pulse:
    """Beats for a step that takes long and gets ahead, from a thread of its own, which sleeps while
    there is no work.
    """

    def __init__(self, executor: Executor, slate: Slate) -> None:
        self._executor = executor
        self._slate = slate
        self._busy = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-pulse", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is work."""
        self._busy.set()

    def rest(self) -> None:
        self._busy.clear()

    def close(self) -> None:
        self._closed.set()
        self._busy.set()
        self._thread.join()

    def _run(self) -> None:
        beats = progress = -1
        while self._busy.wait() and not self._closed.wait(PULSE_S):
            if self._slate.beats == beats and self._executor.progress != progress:
                progress = self._executor.progress
                self._slate.beat()
            beats = self._slate.beats
