"""Replays a recording: repeats the recorded calls on a new Scheduler and compares its decisions.

Times, costs and results are the recorded ones, so the plans must be equal on any hardware. With an
executor, the plans are also executed and their results compared. Works on events; `recorder.py`
reads the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from octavo.api.errors import ConfigError, InvalidRequest
from octavo.config.config_hooks import reuses_generated
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.ports import DecodingExecutor, Executor
from octavo.engine.protocol.step import RowResult, StepPlan, StepResult
from octavo.engine.recording.recorder import (
    Event,
    PrefixCacheReset,
    PrefixFetched,
    PrefixPinned,
    RecordingHeader,
    RequestAborted,
    RequestAdded,
    RequestChanged,
    RequestFailed,
    StepComputed,
    StepPlanned,
    lean_rows,
)
from octavo.engine.requests.sequence_state import Finish
from octavo.engine.requests.stop_strings import MakeStopTexts
from octavo.engine.scheduler.build import build_scheduler
from octavo.engine.scheduler.scheduler import Scheduler

MAX_STEPS_AHEAD = 1
"""Maximum number of steps in flight when a plan is scheduled, without micro-batches."""


@dataclass(slots=True)
class Replayed:
    """Counts and differences found by a replay so far."""

    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    unfinished_step: int | None = None
    """Step whose result is missing in the recording, because the engine ended during it; else
    None.
    """
    differences: list[str] = field(default_factory=list)


class Replay:
    """Replays a recording. `executor`: executes the plans; None: only the scheduler runs.
    `stop_texts`: same as in the recorded engine.
    """

    def __init__(
        self,
        header: RecordingHeader,
        executor: Executor | None = None,
        stop_texts: MakeStopTexts | None = None,
    ) -> None:
        self.found = Replayed()
        self.scheduler = make_scheduler(header, stop_texts)
        """The new scheduler, in its state after the last event."""
        num_micro_batches = get_config(header).backend.pipeline_parallel_size
        self._max_steps_ahead = max(MAX_STEPS_AHEAD, num_micro_batches - 1)
        self._executor = executor
        self._in_flight: deque[StepPlanned] = deque()
        """Recorded plans whose results have not been read yet."""
        self._computed: StepPlan | None = None
        """Plan of the last result, until another event follows."""
        self._results: Iterator[StepResult] = iter(())
        """Yields the results of the plan's further decode steps."""
        self._other_plan = False

    def run(self, events: Iterable[Event], *, max_differences: int = 1) -> Replayed:
        """Replays the steps. Ends early after `max_differences`, or at the first plan that differs,
        since all later plans would differ too.
        """
        for event in events:
            self.apply(event)
            if self._other_plan or len(self.found.differences) >= max_differences:
                return self.found
        for planned in self._in_flight:
            self._execute(planned.plan)
        self.found.unfinished_step = self._in_flight[0].plan.step if self._in_flight else None
        return self.found

    def apply(self, event: Event) -> None:
        """Makes the scheduler call that an event records; adds differences to `found`."""
        if not self._is_repeat(event):
            self._end_decode()
        if isinstance(event, RequestAdded):
            self.found.num_requests += 1
            self.scheduler.add(event.request)
        elif isinstance(event, RequestAborted):
            self.scheduler.end(event.request_id, Finish("abort"))
        elif isinstance(event, RequestChanged):
            self.scheduler.change(event.change)
        elif isinstance(event, RequestFailed):
            self.scheduler.end(event.request_id, Finish("error", error=event.error))
        elif isinstance(event, PrefixCacheReset):
            self.scheduler.blocks.reset_prefix_cache(reset_connector=event.reset_connector)
        elif isinstance(event, PrefixPinned):
            with suppress(InvalidRequest):
                self.scheduler.blocks.pin_prefix(event.pin)
        elif isinstance(event, PrefixFetched):
            self.scheduler.blocks.fetch_prefix(event.prefix)
        elif isinstance(event, StepPlanned):
            self._schedule(event)
        elif isinstance(event, StepComputed):
            self._update(event)
        else:
            raise _damaged("it starts twice")

    def _schedule(self, then: StepPlanned) -> None:
        if len(self._in_flight) > self._max_steps_ahead:
            raise _damaged(f"step {self._in_flight[0].plan.step} has no result, but later steps do")
        plan = self.scheduler.schedule(then.now, then.costs)
        self._in_flight.append(then)
        if plan != then.plan:
            self._other_plan = True
            self.found.differences.append(f"step {then.plan.step}: {_fields(then.plan, plan)}")

    def _is_repeat(self, event: Event) -> bool:
        """Returns whether an event is the result of a further decode step of the last plan."""
        return (
            isinstance(event, StepComputed)
            and self._computed is not None
            and event.result.step == self._computed.step
        )

    def _end_decode(self) -> None:
        """Ends a multi-step plan after the same step as in the recording."""
        self.scheduler.end_decode()
        self._results = iter(())
        self._computed = None

    def _execute(self, plan: StepPlan) -> StepResult | str | None:
        """Returns the executor's result of a plan's first step, or its error message. Returns None
        without an executor.

        Plans are executed in order even if the recorded engine ran ahead, so a token that a row
        takes from the device has already been sampled.
        """
        if self._executor is None:
            return None
        try:
            if plan.num_steps == 1:
                return self._executor.execute(plan)
            assert isinstance(self._executor, DecodingExecutor)
            self._results = self._executor.decode(plan)
            return next(self._results)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _execute_next(self) -> StepResult | str | None:
        """Returns the executor's result of the next decode step of the last plan, or its error
        message. Returns None without an executor.
        """
        if self._executor is None:
            return None
        try:
            return next(self._results)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _update(self, then: StepComputed) -> None:
        if self._computed is not None:
            plan, result = self._computed, self._execute_next()
            if self.scheduler.in_flight.decoding is None:
                raise _damaged(f"step {plan.step} has more results than steps")
        elif self._in_flight:
            plan = self._in_flight.popleft().plan
            if plan.num_steps > 1:  # `start` of each row advances with each step
                rows = [msgspec.structs.replace(row) for row in plan.rows]
                plan = msgspec.structs.replace(plan, rows=rows)
            result = self._execute(plan)
        else:
            raise _damaged(f"step {then.result.step} has a result and no plan")
        if [row.request_id for row in plan.rows] != [row.request_id for row in then.result.rows]:
            raise _damaged(f"step {plan.step} has the result of another plan")
        self._computed = plan
        if then.failed:
            self.scheduler.plan_failed(plan)
        elif isinstance(result, str):
            self.found.differences.append(f"step {plan.step}: it failed now: {result}")
        elif result is not None:
            self._compare(plan, then.result.rows, result.rows)
        self.scheduler.update(plan, then.result)
        self.found.num_steps += 1
        self.found.num_tokens += sum(len(row.token_ids) for row in then.result.rows)

    def _compare(self, plan: StepPlan, then: list[RowResult], now: list[RowResult]) -> None:
        for old, new in zip(then, lean_rows(plan, now), strict=True):
            if old != new:
                self.found.differences.append(
                    f"step {plan.step}, request {old.request_id}: {_fields(old, new)}"
                )


def get_config(header: RecordingHeader) -> EngineConfig:
    """Returns the recorded engine's options."""
    return EngineConfig.from_options(**header.options)


def make_scheduler(header: RecordingHeader, stop_texts: MakeStopTexts | None = None) -> Scheduler:
    """Returns a new scheduler with the recorded engine's options."""
    config = get_config(header)
    return build_scheduler(
        header.scheduler,
        header.cache,
        header.groups,
        block_size=header.block_size,
        max_model_len=header.max_model_len,
        tiers=header.tiers,
        stop_texts=stop_texts,
        num_adapter_slots=config.lora.num_slots,
        can_resample=header.can_resample,
        caches_generated=reuses_generated(config),
        num_micro_batches=config.backend.pipeline_parallel_size,
        original=header.original,
    )


def _damaged(what: str) -> ConfigError:
    return ConfigError(f"the recording is damaged: {what}")


def _fields(then: msgspec.Struct, now: msgspec.Struct) -> str:
    """Returns a message with the fields that differ, and both values."""
    pairs = [(name, getattr(then, name), getattr(now, name)) for name in then.__struct_fields__]
    return "; ".join(
        f"{name} was {_short(old)}, now it is {_short(new)}"
        for name, old, new in pairs
        if old != new
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else text[:397] + "..."
