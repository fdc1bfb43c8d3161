"""The engine's heart: plan a step, execute it, take in what it yielded.

Owns the scheduler, the executor and the measured costs of steps: the one place of the control plane
that has a clock. The caller of `step`, in this process or across a boundary, is the client's
business. An executor that can computes a step while the next one is planned.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import cast

from octavo.api.errors import EngineDead
from octavo.engine.kv_meter import KvMeter
from octavo.engine.live.watch import EngineWatch, view_of
from octavo.engine.protocol.outputs import CoreOutputs, EngineOutput
from octavo.engine.protocol.ports import AsyncExecutor, DecodingExecutor, Executor, Launched
from octavo.engine.protocol.requests import EngineRequest, Pin, RequestChange
from octavo.engine.protocol.stats import EngineStats, StepTokens
from octavo.engine.protocol.step import RowResult, StepPlan, StepResult
from octavo.engine.protocol.step_costs import UNMEASURED, StepCostMeter, StepCosts
from octavo.engine.protocol.view import EngineView
from octavo.engine.recording.recorder import (
    Log,
    NoLog,
    PrefixCacheReset,
    PrefixPinned,
    RequestAborted,
    RequestAdded,
    RequestChanged,
    RequestFailed,
    StepComputed,
    StepPlanned,
)
from octavo.engine.requests.sequence_state import Finish
from octavo.engine.scheduler.scheduler import Scheduler

CLOSE_S = 2.0
COSTS_INTERVAL_S = 0.5
"""Period at which the outputs of steps tell what steps cost, in seconds."""


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that was computed at once, or could not be. Implements `ports.Launched`."""

    made: StepResult | Exception

    def result(self) -> StepResult:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that is planned and not taken in."""

    plan: StepPlan
    launched: Launched
    began: float
    """When it was planned, on the core's clock."""
    is_first: bool = True
    """Whether it is the first decode step of its plan."""


@dataclass(slots=True)
class Decode:
    """A plan of several decode steps that is being carried out."""

    plan: StepPlan
    results: Generator[StepResult]
    """Computes the next step each time it is advanced."""
    num_repeated: int = 0
    repeated_s: float = 0.0
    """Wall clock of the steps after the first, and how many they are."""


class EngineCore:
    """One engine: requests in, outputs out, step by step. Every request added ends in exactly one
    output with a finish_reason.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        log: Log | None = None,
        stall_timeout_s: float = 0.0,
        kv_meter: KvMeter | None = None,
        runs_ahead: bool = False,
        num_micro_batches: int = 1,
        costs: StepCosts = UNMEASURED,
    ) -> None:
        """Takes `stall_timeout_s`, the seconds that steps may compute nothing though requests wait
        before the first of these fails; 0 waits for ever.

        With `runs_ahead` the executor, an AsyncExecutor, is given the next step while it computes
        one; with several lanes it has a step of each. `costs` is what is known of steps before the
        first one is measured.
        """
        self.scheduler = scheduler
        self.executor = executor
        self._log = log or NoLog()
        self._is_logged = not isinstance(self._log, NoLog)
        self._clock = clock
        self._meter = StepCostMeter(costs)
        self._measured_until = 0.0
        """End of the last step taken in, on the clock; the next one is measured from there where it
        was planned before.
        """
        self._kv_meter = kv_meter or KvMeter()
        self._step_tokens = StepTokens()
        self._stall_timeout_s = stall_timeout_s
        self._holds_memory = False
        """Whether memory that is given on demand is held; the step after the last request's gives
        it back.
        """
        self._moved: float | None = None
        """When a step last computed anything, or no request waited; None before the first step of
        the present requests.
        """
        self.steps_ahead = max(num_micro_batches - 1, 1 if runs_ahead else 0)
        """Steps that are launched before the oldest one is taken in."""
        self._in_flight: deque[StepInFlight] = deque()
        self._told = EngineStats()
        """Statistics that went out with the last outputs."""
        self._decode: Decode | None = None
        """The plan of several decode steps that is being carried out."""
        self._early: list[EngineOutput] = []
        """Outputs of steps that were taken in between two calls of `step`."""
        self._watch: EngineWatch | None = None
        self._costs_told: float | None = None
        """Moment at which the outputs last told what steps cost; None before they did."""

    @property
    def has_work(self) -> bool:
        return (
            bool(self._in_flight)
            or self._decode is not None
            or self.scheduler.has_work
            or self._holds_memory
            or bool(self._early)
            or bool(self.scheduler.blocks.events)
        )

    @property
    def plans_in_flight(self) -> list[StepPlan]:
        """Plans whose results have not been taken in, the oldest first."""
        return [step.plan for step in self._in_flight]

    @property
    def costs(self) -> StepCosts:
        """Costs of steps as measured so far."""
        return self._meter.costs

    def add(self, request: EngineRequest) -> None:
        self._end_decode()
        self._log.write(RequestAdded(request))
        if not self.has_work:
            self._moved = None
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self._end_decode()
        self._log.write(RequestAborted(request_id))
        self.scheduler.end(request_id, Finish("abort"))

    def fail(self, request_id: str, error: str) -> None:
        """Ends a request for a reason that is not the user's."""
        self._end_decode()
        self._log.write(RequestFailed(request_id, error))
        self.scheduler.end(request_id, Finish("error", error=error))

    def change(self, change: RequestChange) -> None:
        """Gives a request that waits or runs other params and another priority."""
        self._end_decode()
        self._log.write(RequestChanged(change))
        self.scheduler.change(change)

    def watch(self, period_s: float) -> None:
        """Adds a view to the outputs every `period_s` seconds in which steps are made, and to
        those of the last step; 0 ends it.
        """
        self._watch = EngineWatch(self.scheduler, period_s) if period_s else None

    def view(self, *, with_blocks: bool) -> EngineView:
        """Returns the engine as it is now, without steps."""
        return view_of(self.scheduler, self._clock(), with_blocks=with_blocks)

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        self.settle()
        self._log.write(PrefixCacheReset(reset_connector))
        return self.scheduler.blocks.reset_prefix_cache(reset_connector=reset_connector)

    def pin_prefix(self, pin: Pin) -> int:
        """Keeps a prompt in the prefix cache for a time; returns how many of its tokens, or raises
        InvalidRequest.
        """
        self._end_decode()
        self._log.write(PrefixPinned(pin))
        return self.scheduler.blocks.pin_prefix(pin)

    def pause_s(self) -> float:
        """Returns the seconds for which steps do nothing unless a request comes or goes."""
        if self._in_flight or self._decode or self._early or self.scheduler.blocks.events:
            return 0.0
        return self.scheduler.pause_s(self._clock())

    def step(self) -> CoreOutputs:
        """Plans a step and takes one in: the same, or, where the executor runs ahead, the one
        before. Either may be left to the next call.

        Where a plan holds several decode steps, each call takes in one of them.
        """
        outputs, self._early = self._early, []
        events = self.scheduler.blocks.events
        step = None if self._decode is None else self._next_decode_step(self._decode)
        if step is None:
            if self._may_plan:
                began, plan = self._plan()
                self._in_flight.append(StepInFlight(plan, self._launch(plan), began))
                if len(self._in_flight) <= self.steps_ahead:
                    return CoreOutputs(outputs, self._stats(), block_events=events.take())
            step = self._in_flight.popleft()
        outputs += self._update(step)
        return CoreOutputs(
            outputs,
            # Between the decode steps of a plan, the counters are those before it.
            self._told if self._decode is not None else self._stats(),
            None if self._watch is None else self._view(self._watch),
            events.take(),
            costs=self._costs_if_due(),
        )

    def _costs_if_due(self) -> StepCosts | None:
        now = self._measured_until
        if self._costs_told is not None and now - self._costs_told < COSTS_INTERVAL_S:
            return None
        self._costs_told = now
        return self._meter.costs

    @property
    def _may_plan(self) -> bool:
        """Whether a plan can be made now: not after a step that could not be launched, nor without
        results that it needs.
        """
        return not self._in_flight or not (
            isinstance(self._in_flight[-1].launched, CompletedStep)
            or self.scheduler.waits_for_results
        )

    def _plan(self) -> tuple[float, StepPlan]:
        now, costs = self._clock(), self._meter.costs
        plan = self.scheduler.schedule(now, costs)
        self._log.write(StepPlanned(now, costs, plan, self.scheduler.waits_for))
        self._end_starvation(plan, now)
        return now, plan

    def _launch(self, plan: StepPlan) -> Launched:
        try:
            if self.steps_ahead and isinstance(self.executor, AsyncExecutor):
                assert plan.num_steps == 1, "the next plan counts on one token of each row"
                return self.executor.launch(plan)
            if plan.num_steps == 1:
                return CompletedStep(self.executor.execute(plan))
            # Other executors are given plans of one step.
            results = cast("DecodingExecutor", self.executor).decode(plan)
            self._decode = Decode(plan, results)
            return CompletedStep(next(results))
        except Exception as error:
            return CompletedStep(error)

    def _next_decode_step(self, decode: Decode) -> StepInFlight | None:
        """Computes the next step of a plan of several decode steps; None if there is none."""
        began = self._clock()
        try:
            result: StepResult | Exception | None = next(decode.results, None)
        except Exception as error:
            result = error
        if result is None:
            self._end_decode()
            return None
        self.scheduler.repeat()
        return StepInFlight(decode.plan, CompletedStep(result), began, is_first=False)

    def _end_decode(self) -> None:
        """Ends a plan of several decode steps behind the last one that was taken in."""
        if self._decode is not None:
            self._decode.results.close()
            self.scheduler.end_decode()
            plan, num_repeated = self._decode.plan, self._decode.num_repeated
            self._meter.repeat(plan, num_repeated, self._decode.repeated_s)
            self._kv_meter.repeat(plan, num_repeated)
            self._decode = None

    def _update(self, step: StepInFlight) -> list[EngineOutput]:
        """Waits for a step's result, and updates the scheduler and what is measured of steps."""
        plan = step.plan
        result = self._result(plan, step.launched)
        if step.is_first:
            self._kv_meter.observe(plan, result, self.scheduler)
        if plan.rows:
            self._step_tokens.add(plan.num_tokens if step.is_first else len(plan.rows))
        self._holds_memory = bool(result.kv_bytes)
        outputs = self.scheduler.update(plan, result)
        now = self._clock()
        elapsed_s = now - max(step.began, self._measured_until)
        self._measured_until = now
        if step.is_first:
            self._meter.observe(plan, result, elapsed_s)
        elif self._decode is not None:
            self._decode.num_repeated += 1
            self._decode.repeated_s += elapsed_s
        if self._decode is not None and self.scheduler.in_flight.decoding is None:
            self._end_decode()
        if self._watch is not None:
            self._watch.note(plan, elapsed_s)
        return outputs

    def settle(self) -> None:
        """Takes in all steps in flight; their outputs come with the next step."""
        self._end_decode()
        while self._in_flight:
            self._early += self._update(self._in_flight.popleft())

    def _view(self, watch: EngineWatch) -> EngineView | None:
        """Returns a view if one is due."""
        began = self._clock()
        view = watch.view(began, is_last=not self.has_work)
        if view is not None:
            now = self._clock()
            watch.spent(now, now - began)
        return view

    def _stats(self) -> EngineStats:
        self._told = stats = self.scheduler.stats()
        stats.kv, stats.kv_sums = self._kv_meter.now, self._kv_meter.sums
        stats.step_tokens = self._step_tokens + StepTokens()
        return stats

    def _result(self, plan: StepPlan, launched: Launched) -> StepResult:
        """Waits for a step's result. An exception fails the step's requests and no other: their
        blocks and rows are freed, and the engine goes on. EngineDead ends it.
        """
        try:
            result = launched.result()
        except EngineDead:
            raise
        except Exception as error:
            failure = f"the step failed: {type(error).__name__}: {error}"
            self.scheduler.plan_failed(plan)
            result = StepResult(
                plan.step, [RowResult(row.request_id, failure=failure) for row in plan.rows]
            )
            self._log.write(StepComputed(result, failed=True))
            return result
        if self._is_logged:
            self._log.write(StepComputed(result))
        return result

    def _end_starvation(self, plan: StepPlan, now: float) -> None:
        """Fails the request that keeps the others waiting, where steps go on but compute none for
        `stall_timeout_s`.
        """
        is_busy = (
            plan.rows
            or self._in_flight
            or self.scheduler.grammars.is_compiling  # the front has seen the grammar compile
            or self.scheduler.pause_s(now)
        )
        first = None if is_busy else self.scheduler.queues.first_idle
        if first is None or self._moved is None:
            self._moved = now
        elif 0 < self._stall_timeout_s <= now - self._moved:
            reason = self.scheduler.waits_for or "the reason is not known"
            self.fail(
                first.request_id,
                f"no step could start it for {self._stall_timeout_s:g} s (stall_timeout): {reason}",
            )
            self._moved = now

    def close(self) -> None:
        """Closes the executor; the connector gets a little time to save what it still has to."""
        self.settle()
        end = time.monotonic() + CLOSE_S
        while self.scheduler.blocks.connector.has_work and time.monotonic() < end:
            self.step()
        self.settle()
        self.executor.close()
        self._log.close()
