"""How many lines of batches run at once on each model: many on an idle engine, few beside other
requests.

Lines stand behind all other requests in the engine itself. What the engine cannot give back, the
places and KV blocks of lines that run already, is bounded here: new lines start slowly after
other requests have run, and while one of those waits, the line that started last is put back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import OctavoError
from octavo.server.state.service import Service

SHARE_BESIDE_OTHERS = 8
"""Lines of batches run beside other requests in one of this many of their places."""

ResultT = TypeVar("ResultT")


class PutBack(Exception):
    """A line was stopped so that another request can run; it is to be run again."""


@dataclass(frozen=True, slots=True)
class GatePace:
    """The gate's speed."""

    look_every_s: float = 0.05
    """Time between two looks at an engine, in seconds."""
    double_every_s: float = 1.0
    """Time in which the lines allowed at once double on an engine without other requests."""


class BatchGate:
    """The places of all batches' lines, each model's entered in turn."""

    def __init__(self, service: Service, pace: GatePace | None = None) -> None:
        self._service = service
        self._pace = pace or GatePace()
        self._lanes: dict[str, _Lane] = {}
        """Lanes of the models that have lines, by public name."""

    async def run(self, work: Coroutine[Any, Any, ResultT], model: str | None) -> ResultT:
        """Runs a line when there is a place for it; raises PutBack where it had to give way."""
        try:
            name = self._service.models.find(model).name
        except OctavoError:
            return await work  # what is wrong is the line's answer
        lane = self._lanes.setdefault(name, _Lane(self._service, name, self._pace))
        lane.num_inside += 1
        try:
            return await lane.run(work)
        finally:
            lane.num_inside -= 1
            if not lane.num_inside:
                self._lanes.pop(name, None)


class _Lane:
    """The lines of one model, those that wait and those that run."""

    def __init__(self, service: Service, model: str, pace: GatePace) -> None:
        self.num_inside = 0
        """Number of lines that wait or run."""
        self._service = service
        self._model = model
        self._pace = pace
        self._turn = asyncio.Lock()
        self._running: list[asyncio.Task[Any]] = []
        """Lines that run, oldest first."""
        self._allowed = 1
        self._doubled_at = 0.0
        self._watcher: asyncio.Task[None] | None = None

    async def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        try:
            async with self._turn:
                while not self._may_start():
                    await asyncio.sleep(self._pace.look_every_s)
                task = asyncio.create_task(work)
        except BaseException:
            work.close()
            raise
        self._running.append(task)
        self._watch()
        try:
            return await task
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if task.cancelled() and this is not None and not this.cancelling():
                raise PutBack from None
            task.cancel()
            raise
        finally:
            self._running.remove(task)

    def _may_start(self) -> bool:
        llm = self._llm()
        if llm is None:
            return True  # what is wrong is the line's answer
        most = self._service.settings.max_running_batch_lines
        if most is None:
            most = max(1, llm.config.scheduler.max_num_seqs // 2)
        if self._num_others(llm):
            self._allowed = max(1, most // SHARE_BESIDE_OTHERS)
            return llm.stats().num_waiting == 0 and len(self._running) < self._allowed
        now = time.monotonic()
        if now - self._doubled_at > self._pace.double_every_s:
            self._allowed, self._doubled_at = min(most, 2 * self._allowed), now
        return len(self._running) < self._allowed

    def _num_others(self, llm: AsyncLLM) -> int:
        """Returns how many requests of the engine are no lines."""
        return llm.num_unfinished - len(self._running)

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._give_way())

    async def _give_way(self) -> None:
        """Stops the youngest line while another request waits; ends with the last line."""
        while self._running:
            await asyncio.sleep(self._pace.look_every_s)
            llm = self._llm()
            if llm is None or not self._running:
                continue
            if self._num_others(llm) > 0 and llm.stats().num_waiting > 0:
                self._running[-1].cancel()

    def _llm(self) -> AsyncLLM | None:
        """Returns the engine of the model; None while it cannot take requests."""
        try:
            return self._service.loaded_model(self._model).llm
        except OctavoError:
            return None
