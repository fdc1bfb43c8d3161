"""Limits how many batch requests run at once on each model: many on an idle engine, few beside
other requests.

Batch requests have the lowest priority in the engine. This gate limits how many KV blocks and batch
slots they occupy: after other requests have run, batch requests start slowly, and while another
request waits, the youngest batch request is aborted and requeued.
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
"""While other requests run, batches get 1/N of their usual slots."""

ResultT = TypeVar("ResultT")


class PutBack(Exception):
    """A batch request was aborted in favour of another request and must be run again."""


@dataclass(frozen=True, slots=True)
class GatePace:
    """Timing of the gate."""

    look_every_s: float = 0.05
    """Interval of checks of an engine, in seconds."""
    double_every_s: float = 1.0
    """Interval after which the number of allowed requests doubles, on an engine without other
    requests.
    """


class BatchGate:
    """Admits the requests of all batches, in FIFO order for each model."""

    def __init__(self, service: Service, pace: GatePace | None = None) -> None:
        self._service = service
        self._pace = pace or GatePace()
        self._lanes: dict[str, _ModelQueue] = {}
        """Lanes by public model name."""

    async def run(self, work: Coroutine[Any, Any, ResultT], model: str | None) -> ResultT:
        """Runs a batch request when it is admitted; raises PutBack if it was preempted."""
        try:
            name = self._service.models.find(model).name
        except OctavoError:
            return await work  # the request itself fails with the error
        lane = self._lanes.setdefault(name, _ModelQueue(self._service, name, self._pace))
        lane.num_inside += 1
        try:
            return await lane.run(work)
        finally:
            lane.num_inside -= 1
            if not lane.num_inside:
                self._lanes.pop(name, None)


class _ModelQueue:
    """Waiting and running batch requests of one model."""

    def __init__(self, service: Service, model: str, pace: GatePace) -> None:
        self.num_inside = 0
        """Number of waiting and running requests."""
        self._service = service
        self._model = model
        self._pace = pace
        self._turn = asyncio.Lock()
        self._running: list[asyncio.Task[Any]] = []
        """Running requests, oldest first."""
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
            return True  # the request itself fails with the error
        max_running = self._service.settings.max_running_batch_lines
        if max_running is None:
            max_running = max(1, llm.config.scheduler.max_num_seqs // 2)
        if self._count_others(llm):
            self._allowed = max(1, max_running // SHARE_BESIDE_OTHERS)
            return llm.stats().num_waiting == 0 and len(self._running) < self._allowed
        now = time.monotonic()
        if now - self._doubled_at > self._pace.double_every_s:
            self._allowed, self._doubled_at = min(max_running, 2 * self._allowed), now
        return len(self._running) < self._allowed

    def _count_others(self, llm: AsyncLLM) -> int:
        """Returns the number of the engine's requests that are not batch requests."""
        return llm.num_unfinished - len(self._running)

    def _watch(self) -> None:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._preempt())

    async def _preempt(self) -> None:
        """Aborts the youngest batch request while another request waits. Returns when no batch
        request runs.
        """
        while self._running:
            await asyncio.sleep(self._pace.look_every_s)
            llm = self._llm()
            if llm is None or not self._running:
                continue
            if self._count_others(llm) > 0 and llm.stats().num_waiting > 0:
                self._running[-1].cancel()

    def _llm(self) -> AsyncLLM | None:
        """Returns the model's engine; None if it is not available."""
        try:
            return self._service.loaded_model(self._model).llm
        except OctavoError:
            return None
