"""The engine's heart: plan a step, execute it, take in what it yielded.

Owns the scheduler, the executor and the measured rates, and nothing else: who calls `step`, and whether across a process boundary, is
the client's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from octavo.engine.kv_meter import KvMeter
from octavo.engine.pin import Pin
from octavo.engine.rates import RateMeter
from octavo.engine.recorder import Aborted, Added, CacheReset, Computed, GivenUp, Log, NoLog, Pinned, Planned
from octavo.engine.request import EngineOutput, EngineRequest
from octavo.engine.scheduler import Scheduler
from octavo.engine.stats import EngineStats
from octavo.ports import Executor
from octavo.step import RowResult, StepPlan, StepResult

CLOSE_S = 2.0


class CoreOutputs(msgspec.Struct):
    """What one step gave."""

    outputs: list[EngineOutput]
    stats: EngineStats


class EngineCore:
    """Requests in, steps, outputs out. Every request added ends in exactly one output with a finish_reason."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        log: Log | None = None,
        stall_timeout_s: float = 0.0,
        kv_meter: KvMeter | None = None,
    ) -> None:
        """`stall_timeout_s`: for how long steps may compute nothing though requests wait, before the first of these fails; 0: for ever."""
        self.scheduler = scheduler
        self.executor = executor
        self._log = log or NoLog()
        self._clock = clock
        self._meter = RateMeter()
        self._kv_meter = kv_meter or KvMeter()
        self._stall_timeout_s = stall_timeout_s
        self._holds_memory = False
        """That is given on demand: the step after the last request's takes it back."""
        self._moved: float | None = None
        """When a step last computed anything, or nobody waited for one; None before the first step of those that are here."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._holds_memory

    def add(self, request: EngineRequest) -> None:
        self._log.write(Added(request))
        if not self.has_work:
            self._moved = None
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self._log.write(Aborted(request_id))
        self.scheduler.abort(request_id)

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        self._log.write(CacheReset(reset_connector))
        return self.scheduler.blocks.reset_prefix_cache(reset_connector=reset_connector)

    def pin_prefix(self, pin: Pin) -> int:
        """How many tokens of the prompt are kept; InvalidRequest where that cannot be."""
        self._log.write(Pinned(pin))
        return self.scheduler.blocks.pin_prefix(pin)

    def pause_s(self) -> float:
        """For how long a step would do nothing, unless a request comes or goes."""
        return self.scheduler.pause_s(self._clock())

    def step(self) -> CoreOutputs:
        now, rates = self._clock(), self._meter.rates
        plan = self.scheduler.schedule(now, rates)
        self._log.write(Planned(now, rates, plan, self.scheduler.waits_for))
        self._end_starvation(plan, now)
        result = self._execute(plan)
        self._meter.observe(plan, result)
        self._kv_meter.observe(plan, result, self.scheduler)
        self._holds_memory = bool(result.kv_bytes)
        outputs = self.scheduler.update(plan, result)
        return CoreOutputs(outputs, self._stats())

    def _stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        stats.kv, stats.kv_sums = self._kv_meter.now, self._kv_meter.sums
        return stats

    def _execute(self, plan: StepPlan) -> StepResult:
        """An exception fails the step's requests and no other: their blocks and rows are freed, and the engine goes on."""
        try:
            result = self.executor.execute(plan)
        except Exception as error:
            failure = f"the step failed: {type(error).__name__}: {error}"
            self.scheduler.plan_failed(plan)
            result = StepResult(plan.step, [RowResult(row.request_id, failure=failure) for row in plan.rows])
            self._log.write(Computed(result, failed=True))
        else:
            self._log.write(Computed(result))
        return result

    def _end_starvation(self, plan: StepPlan, now: float) -> None:
        """Steps go on, but nobody is computed: whoever keeps the others waiting fails, so that they come to their turn."""
        first = None if plan.rows or self.scheduler.pause_s(now) else self.scheduler.next_to_run
        if first is None or self._moved is None:
            self._moved = now
        elif 0 < self._stall_timeout_s <= now - self._moved:
            reason = self.scheduler.waits_for or "nobody knows why"
            error = f"no step could start it for {self._stall_timeout_s:g} s (stall_timeout): {reason}"
            self._log.write(GivenUp(first, error))
            self.scheduler.fail(first, error)
            self._moved = now

    def close(self) -> None:
        """What the connector has still to save is saved, given a little time."""
        end = time.monotonic() + CLOSE_S
        while self.scheduler.blocks.connector.has_work and time.monotonic() < end:
            self.step()
        self.executor.close()
        self._log.close()
