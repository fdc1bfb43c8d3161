"""Schedules a step, executes it, and updates the requests by its result.

Owns the scheduler, the executor and the measured step costs; no other part of the control plane
reads a clock. An asynchronous executor computes a step while the next one is scheduled.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import cast

from octavo.api.errors import EngineDead
from octavo.engine.kv_meter import KvMeter
from octavo.engine.live.watch import EngineWatch, make_view
from octavo.engine.protocol.outputs import CoreOutputs, EngineOutput
from octavo.engine.protocol.ports import AsyncExecutor, DecodingExecutor, Executor, Launched
from octavo.engine.protocol.requests import (
    CountStored,
    EngineRequest,
    FetchPrefix,
    Pin,
    Query,
    QueryAnswer,
    RequestChange,
    ViewEngine,
)
from octavo.engine.protocol.stats import STEP_TOKEN_BOUNDS, EngineStats, StepTokens
from octavo.engine.protocol.step import RowResult, StepPlan, StepResult
from octavo.engine.protocol.step_costs import UNMEASURED, StepCostMeter, StepCosts
from octavo.engine.protocol.view import EngineView
from octavo.engine.recording.recorder import (
    Event,
    PrefixCacheReset,
    PrefixFetched,
    PrefixPinned,
    Recorder,
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
"""Interval at which outputs carry the measured step costs, in seconds."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A scheduled step that `Scheduler.update` has not processed yet."""

    plan: StepPlan
    outcome: StepResult | Exception | Launched
    """Result or exception of a synchronous step; a launched step otherwise."""
    began: float
    """Time at which it was scheduled, on the core's clock."""
    is_first: bool = True
    """Whether it is the first decode step of its plan."""


@dataclass(slots=True)
class Decode:
    """A multi-step plan that is being executed."""

    plan: StepPlan
    results: Generator[StepResult]
    """Computes the next step each time it is advanced."""
    num_repeated: int = 0
    """Steps after the first."""
    repeated_s: float = 0.0
    """Wall clock time of the steps after the first, in seconds."""


class EngineCore:
    """One engine: adds requests and computes steps. Every added request ends in exactly one output
    with a finish_reason.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        log: Recorder | None = None,
        stall_timeout_s: float = 0.0,
        kv_meter: KvMeter | None = None,
        runs_ahead: bool = False,
        num_micro_batches: int = 1,
        costs: StepCosts = UNMEASURED,
    ) -> None:
        """`stall_timeout_s`: if steps have computed nothing for this many seconds while requests
        wait, the first waiting request fails; 0: never. `runs_ahead`: with an asynchronous
        executor, the next step is launched while one is computed (with micro-batches: one step of
        each). `costs`: step costs until the first measurement.
        """
        self.scheduler = scheduler
        self.executor = executor
        self._log = log
        self._clock = clock
        self._meter = StepCostMeter(costs)
        self._measured_until = 0.0
        """End of the last processed step, on the core's clock. A step that was scheduled before
        this time is measured from here.
        """
        self._kv_meter = kv_meter or KvMeter()
        self._step_tokens = StepTokens()
        self._stall_timeout_s = stall_timeout_s
        self._holds_memory = False
        """Whether the worker holds memory that it allocates on demand; one more step after the last
        request frees it.
        """
        self._moved: float | None = None
        """Time of the last step that computed anything or after which no request waited. None
        before the first step of the current requests.
        """
        self.steps_ahead = max(num_micro_batches - 1, 1 if runs_ahead else 0)
        """Number of steps that are launched before the oldest one is processed."""
        self._in_flight: deque[StepInFlight] = deque()
        self._last_stats = EngineStats()
        """Statistics of the last outputs."""
        self._decode: Decode | None = None
        """The multi-step plan that is being executed."""
        self._early: list[EngineOutput] = []
        """Outputs of steps that were processed outside of `step`."""
        self._is_held = False
        self._watch: EngineWatch | None = None
        self._costs_sent = -math.inf
        """Time of the last outputs that contained step costs."""

    @property
    def has_work(self) -> bool:
        if self._is_held:
            return bool(self._early or self.scheduler.ended_outputs)
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
        """Launched plans without results, oldest first."""
        return [step.plan for step in self._in_flight]

    @property
    def costs(self) -> StepCosts:
        return self._meter.costs

    def _record(self, event: Event) -> None:
        if self._log is not None:
            self._log.write(event)

    def add(self, request: EngineRequest) -> None:
        self._end_decode()
        self._record(RequestAdded(request))
        if not self.has_work:
            self._moved = None
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self._end_decode()
        self._record(RequestAborted(request_id))
        self.scheduler.end(request_id, Finish("abort"))

    def fail(self, request_id: str, error: str) -> None:
        """Ends a request with finish_reason "error"."""
        self._end_decode()
        self._record(RequestFailed(request_id, error))
        self.scheduler.end(request_id, Finish("error", error=error))

    def change(self, change: RequestChange) -> None:
        """Changes the params and priority of an unfinished request."""
        self._end_decode()
        self._record(RequestChanged(change))
        self.scheduler.change(change)

    def hold(self, *, holds: bool) -> None:
        """Finishes the steps in flight and computes no others, or continues. A core that is held
        still accepts, changes and aborts requests.
        """
        self.settle()
        self._is_held = holds
        self._moved = None

    def watch(self, period_s: float) -> None:
        """Adds a view to the outputs every `period_s` seconds while steps run, and to the outputs
        of the last step; 0 stops it.
        """
        self._watch = EngineWatch(self.scheduler, period_s) if period_s else None

    def query(self, query: Query) -> QueryAnswer:
        """Returns the reply to a query; raises InvalidRequest if the query is invalid."""
        blocks = self.scheduler.blocks
        if isinstance(query, ViewEngine):
            return make_view(self.scheduler, self._clock(), with_blocks=query.with_blocks)
        if isinstance(query, Pin):
            self._end_decode()
            self._record(PrefixPinned(query))
            return blocks.pin_prefix(query)
        if isinstance(query, CountStored):
            return blocks.count_stored(query)
        if isinstance(query, FetchPrefix):
            self._end_decode()
            self._record(PrefixFetched(query.prefix))
            return blocks.fetch_prefix(query.prefix)
        self.settle()
        self._record(PrefixCacheReset(query.reset_connector))
        return int(blocks.reset_prefix_cache(reset_connector=query.reset_connector))

    def pause_s(self) -> float | None:
        """Returns the seconds for which steps will do nothing unless a request is added or ends;
        None if there is no work at all.
        """
        if self._is_held:
            return 0.0 if self.has_work else None
        if (
            self._decode is not None
            or self._in_flight
            or self._early
            or self.scheduler.blocks.events
        ):
            return 0.0
        if not (self.scheduler.has_work or self._holds_memory):
            return None
        return self.scheduler.pause_s(self._clock())

    def step(self) -> CoreOutputs:
        """Schedules, executes and updates one step. If the executor runs ahead, the updated step is
        an earlier one, and the call may return without a result.

        Each call computes one decode step of a multi-step plan.
        """
        outputs, self._early = self._early, []
        if self._is_held:
            return self._outputs(outputs + self.scheduler.pop_outputs())
        step = None if self._decode is None else self._next_decode_step(self._decode)
        if step is None:
            if not self._in_flight or self._may_plan():
                now, costs = self._clock(), self._meter.costs
                plan = self.scheduler.schedule(now, costs)
                if self._log is not None:
                    self._log.write(StepPlanned(now, costs, plan, self.scheduler.waits_for))
                if not plan.rows:
                    self._end_starvation(now)
                else:
                    self._moved = now
                self._in_flight.append(StepInFlight(plan, self._launch(plan), now))
                if len(self._in_flight) <= self.steps_ahead:
                    return self._outputs(outputs)
            step = self._in_flight.popleft()
        outputs += self._update(step)
        return self._outputs(outputs, with_view=True)

    def _outputs(self, outputs: list[EngineOutput], *, with_view: bool = False) -> CoreOutputs:
        if self._decode is None:  # statistics do not change between the decode steps of a plan
            self._last_stats = self.scheduler.stats()
            self._last_stats.kv, self._last_stats.kv_sums = self._kv_meter.now, self._kv_meter.sums
            tokens = self._step_tokens
            self._last_stats.step_tokens = StepTokens(list(tokens.counts), tokens.total)
        step_outputs = CoreOutputs(outputs, self._last_stats)
        events, now = self.scheduler.blocks.events, self._measured_until
        if events is not None:
            step_outputs.block_events = events.pop_events()
        if with_view:
            if self._watch is not None:
                step_outputs.view = self._view(self._watch)
            if now - self._costs_sent >= COSTS_INTERVAL_S:
                self._costs_sent, step_outputs.costs = now, self._meter.costs
        return step_outputs

    def _may_plan(self) -> bool:
        """Returns whether another step can be scheduled while steps are in flight: not if launching
        one has failed, and not if it needs outstanding results.
        """
        is_done = isinstance(self._in_flight[-1].outcome, StepResult | Exception)
        return not (is_done or self.scheduler.waits_for_results)

    def _launch(self, plan: StepPlan) -> StepResult | Exception | Launched:
        try:
            if self.steps_ahead and isinstance(self.executor, AsyncExecutor):
                assert plan.num_steps == 1, "the next plan counts on one token of each row"
                return self.executor.launch(plan)
            if plan.num_steps == 1:
                return self.executor.execute(plan)
            # Other executors get plans of one step.
            results = cast("DecodingExecutor", self.executor).decode(plan)
            self._decode = Decode(plan, results)
            return next(results)
        except Exception as error:
            return error

    def _next_decode_step(self, decode: Decode) -> StepInFlight | None:
        """Computes the next step of a multi-step plan. Returns None if the plan has ended."""
        began = self._clock()
        try:
            result: StepResult | Exception | None = next(decode.results, None)
        except Exception as error:
            result = error
        if result is None:
            self._end_decode()
            return None
        return StepInFlight(decode.plan, result, began, is_first=False)

    def _end_decode(self) -> None:
        """Ends a multi-step plan after the last step that was computed."""
        if self._decode is not None:
            self._decode.results.close()
            self.scheduler.end_decode()
            plan, num_repeated = self._decode.plan, self._decode.num_repeated
            self._count_step_tokens(len(plan.rows), num_repeated)
            self._meter.repeat(plan, num_repeated, self._decode.repeated_s)
            self._kv_meter.repeat(plan, num_repeated)
            self._decode = None

    def _count_step_tokens(self, num_tokens: int, num_steps: int = 1) -> None:
        """Counts `num_steps` steps of `num_tokens` each."""
        self._step_tokens.counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += num_steps
        self._step_tokens.total += num_steps * num_tokens

    def _update(self, step: StepInFlight) -> list[EngineOutput]:
        """Waits for a step's result, then updates the scheduler and the measurements."""
        plan, result = step.plan, step.outcome
        if not isinstance(result, StepResult):
            result = self._wait(plan, result)
        elif self._log is not None:
            self._log.write(StepComputed(result))
        if step.is_first and plan.rows:
            num_tokens = 0
            for row in plan.rows:
                num_tokens += row.num_tokens + row.num_encoded
            self._kv_meter.observe(result, self.scheduler, num_tokens)
            self._count_step_tokens(num_tokens)
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
        """Waits for all steps in flight; the next call of `step` returns their outputs."""
        self._end_decode()
        while self._in_flight:
            self._early += self._update(self._in_flight.popleft())

    def _view(self, watch: EngineWatch) -> EngineView | None:
        began = self._clock()
        view = watch.view(began, is_last=not self.has_work)
        if view is not None:
            now = self._clock()
            watch.spent(now, now - began)
        return view

    def _wait(self, plan: StepPlan, outcome: Exception | Launched) -> StepResult:
        """Waits for a step's result. An exception fails only the requests of the step; EngineDead
        ends the engine.
        """
        try:
            if isinstance(outcome, Exception):
                raise outcome
            result = outcome.result()
        except EngineDead:
            raise
        except Exception as error:
            failure = f"the step failed: {type(error).__name__}: {error}"
            self.scheduler.plan_failed(plan)
            result = StepResult(
                plan.step, [RowResult(row.request_id, failure=failure) for row in plan.rows]
            )
            self._record(StepComputed(result, failed=True))
            return result
        self._record(StepComputed(result))
        return result

    def _end_starvation(self, now: float) -> None:
        """Fails the request that blocks the others if steps have computed nothing for
        `stall_timeout_s` seconds.
        """
        # Grammar compilation always ends: the frontend has compiled the grammar before.
        is_compiling = self.scheduler.resources.grammars.is_compiling
        is_busy = self._in_flight or is_compiling or self.scheduler.pause_s(now)
        first = None if is_busy else self.scheduler.queues.first_idle
        if first is None or self._moved is None:
            self._moved = now
        elif 0 < self._stall_timeout_s <= now - self._moved:
            reason = self.scheduler.waits_for or "unknown reason"
            self.fail(
                first.request_id,
                f"it could not be scheduled for {self._stall_timeout_s:g} s (stall_timeout):"
                f" {reason}",
            )
            self._moved = now

    def close(self) -> None:
        """Closes the executor after the connector has saved its blocks, at most CLOSE_S seconds
        later.
        """
        self.settle()
        end = time.monotonic() + CLOSE_S
        while self.scheduler.blocks.has_transfers and time.monotonic() < end:
            self.step()
        self.settle()
        self.executor.close()
        if self._log is not None:
            self._log.close()
