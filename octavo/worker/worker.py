"""The execution plane of one device: applies a plan to its rows and blocks, then runs it.
Implements `ports.AsyncExecutor`.

Makes no scheduling decisions. If preparing a request fails, only that request fails
(`request_faults.py`). If a complete step fails, its requests are run one by one to find the one
that causes it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from octavo.api.errors import EngineDead
from octavo.api.outputs import Profile
from octavo.engine.protocol.kv_messages import BlockMove
from octavo.engine.protocol.stats import LATE_COMPILATIONS
from octavo.engine.protocol.step import RowResult, ScheduledRequest, StepPlan, StepResult
from octavo.executor.base import Computing
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.draft_model import DraftModel
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_layers import LayerStreaming
from octavo.worker.lora.adapter_store import AdapterStore
from octavo.worker.media.step_media import StepMedia
from octavo.worker.model_input import ModelInput
from octavo.worker.program_runners import ProgramRunners
from octavo.worker.request_faults import Failures, RequestFaults

logger = logging.getLogger(__name__)

WAIT_S = 0.005
"""Maximum time that a step without rows waits for background work, in seconds, since an arriving
request waits as long.
"""


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A launched step whose result is still outstanding. Implements `ports.Launched`."""

    plan: StepPlan
    worker: Worker
    began: float
    outcome: StepResult
    """The result, except for fields that are known only after the rows are computed."""
    inputs: Sequence[ModelInput] = ()
    computing: Sequence[Computing] = ()
    """Pending results of `inputs`."""
    failures: Failures = field(default_factory=dict)
    rows: list[RowResult] | None = None
    """Results of requests that had to be recomputed one by one; None for a normal step."""

    def result(self) -> StepResult:
        return self.worker.finish(self)


class Worker:
    """Executes the plans of one engine on one device."""

    def __init__(
        self,
        runners: ProgramRunners,
        cache_engine: CacheEngine,
        rows: InputBatch,
        *,
        close: Callable[[], None],
        is_alone: bool = True,
        shares_steps: bool = False,
        adapters: AdapterStore | None = None,
        draft: DraftModel | None = None,
        media: StepMedia | None = None,
        streaming: LayerStreaming | None = None,
    ) -> None:
        """`is_alone`: whether there are no other ranks, which could not follow a step that is
        split. `shares_steps`: whether engines share experts, so that all of them compute each step
        together.
        """
        self._runners = runners
        self._rows = rows
        self.cache_engine = cache_engine
        """The KV cache and its block map."""
        self._connector = cache_engine.connector
        self._kv_counters = cache_engine.counters
        self._launched: deque[LaunchedStep] = deque()
        """Launched steps, in the order in which they are computed and return."""
        self._free_since = 0.0
        """Time at which the device finished the last step that returned."""
        self._close = close
        self._shares_steps = shares_steps
        self._adapters = adapters
        self._draft = draft
        self._media = media
        self._layers = streaming
        self._streaming = nullcontext if streaming is None else streaming.during
        self._faults = RequestFaults(is_alone=is_alone)

    def execute(self, plan: StepPlan) -> StepResult:
        began, outcome = self._begin(plan)
        outcome.rows = self._run(plan.rows) if plan.rows else []
        return self._finish(plan, outcome, began)

    def decode(self, plan: StepPlan) -> Generator[StepResult]:
        """Executes a plan of several decode steps, one each time the iterator is advanced.

        Computes only one step if its rows cannot be decoded together, or if the first step raises.
        """
        began, outcome = self._begin(plan)
        steps: Iterator[list[RowResult]] = iter(())
        rows = None
        try:
            # Requests that fail or need several inputs are computed one step at a time.
            inputs, failures = self._prepare_inputs(plan.rows, plan.num_steps)
            if len(inputs) == 1 and not failures:
                steps = inputs[0].runner.decode(inputs[0], plan.num_steps) or steps
            rows = next(steps, None)
        except EngineDead:
            raise
        except Exception:
            logger.exception(
                "%d decode steps of %d requests failed; running one", plan.num_steps, len(plan.rows)
            )
        outcome.rows = self._run(plan.rows) if rows is None else rows
        yield self._finish(plan, outcome, began)
        while True:
            began = time.perf_counter()
            rows = next(steps, None)
            if rows is None:
                return
            yield self._complete(StepResult(plan.step, rows), plan, began)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a plan on an asynchronous backend; `finish` waits for the result."""
        not_encoded = [] if self._media is None else self._media.apply(plan)
        began = time.perf_counter()
        outcome = StepResult(plan.step, [], moved_s=self._apply(plan), not_encoded=not_encoded)
        step = LaunchedStep(plan, self, began, outcome)
        try:
            step.inputs, step.failures = self._prepare_inputs(plan.rows)
            step.computing = [model_input.runner.launch(model_input) for model_input in step.inputs]
        except Exception:
            logger.exception(
                "a step of %d requests could not be launched; running them one by one",
                len(plan.rows),
            )
            # Rows that are `from_device` need the tokens of earlier steps on the host.
            for earlier in self._launched:
                earlier.rows = self._wait_for(earlier, [])
            step.rows = [result for row in plan.rows for result in self._run([row], again=True)]
        self._launched.append(step)
        return step

    def finish(self, step: LaunchedStep) -> StepResult:
        """Waits for the oldest launched step and returns its result."""
        first = self._launched.popleft()
        assert first is step, "steps return in the order of their launches"
        outcome = step.outcome
        outcome.rows = self._wait_for(step, self._launched)
        moved_s = max(outcome.moved_s, self.cache_engine.settle(step.plan.moves))
        self._begin_connector(step.plan)
        # A step can start only after the previous one, so its busy time starts at that one's end.
        began = max(step.began, self._free_since)
        result = self._finish(step.plan, outcome, began)
        self._free_since = began + result.busy_s
        result.moved_s = min(moved_s, result.busy_s)
        return result

    def _begin(self, plan: StepPlan) -> tuple[float, StepResult]:
        """Applies a plan to rows and blocks; returns its start time, and a result without rows."""
        # Encoding is not included in a step's seconds, from which other steps are predicted.
        not_encoded = [] if self._media is None else self._media.apply(plan)
        began = time.perf_counter()
        moved_s = self._apply(plan)
        if plan.moves:
            moved_s = max(moved_s, self.cache_engine.settle(plan.moves))
        if self._connector is not None:
            self._begin_connector(plan)
        if plan.is_dummy_step:
            self._runners.join()
        return began, StepResult(plan.step, [], moved_s=moved_s, not_encoded=not_encoded)

    def _run(self, rows: Sequence[ScheduledRequest], *, again: bool = False) -> list[RowResult]:
        """Computes requests together or, if that raises, one by one. `again`: the last tokens on an
        asynchronous device may belong to a failed step.
        """
        results: list[RowResult] = []
        try:
            inputs, failures = self._prepare_inputs(rows)
            with self._streaming(inputs):
                for each in inputs:
                    results += each.runner.run_again(each) if again else each.runner.run(each)
        except EngineDead:
            raise
        except Exception as error:
            return self._faults.compute_one_by_one(rows, error, partial(self._run, again=again))
        return _in_order(rows, results, failures) if failures or len(inputs) > 1 else results

    def _prepare_inputs(
        self, rows: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> tuple[list[ModelInput], Failures]:
        """Returns the inputs of a step, and the failures of requests that cannot be prepared."""
        if not rows:
            return [], {}
        prepare_inputs = (self._runners.single or self._runners).prepare_inputs
        if not self._faults.failed:
            try:
                return prepare_inputs(rows, num_steps), {}
            except Exception:
                pass  # raised, logged and narrowed to one request below
        inputs, failures = self._faults.prepare_inputs(rows, prepare_inputs, num_steps)
        if self._shares_steps and not inputs and num_steps == 1:
            self._runners.join()
        return inputs, failures

    def _wait_for(
        self, step: LaunchedStep, launched_on_it: Iterable[LaunchedStep]
    ) -> list[RowResult]:
        """Waits for a step's rows. If a step fails after its launch, it is recomputed, together
        with the steps launched after it, which got wrong last tokens.
        """
        if step.rows is not None:
            return step.rows
        rows = step.plan.rows
        results: list[RowResult] = []
        try:
            for each, computing in zip(step.inputs, step.computing, strict=True):
                results += each.runner.results(each, computing.result())
            plain = not step.failures and len(step.inputs) < 2
            return results if plain else _in_order(rows, results, step.failures)
        except Exception:
            logger.exception(
                "a step of %d requests failed after its launch; computing it again", len(rows)
            )
        results = self._run(rows, again=True)
        for later in launched_on_it:
            later.rows = self._run(later.plan.rows, again=True) if later.plan.rows else []
        return results

    def _finish(self, plan: StepPlan, outcome: StepResult, began: float) -> StepResult:
        """Completes the result of a plan's first step with the results of background work. A step
        without rows waits for them for a short time.
        """
        result = self._complete(outcome, plan, began)
        wait_s = 0.0 if plan.rows else WAIT_S
        if self._connector is not None:
            result.connector = self._connector.report(wait_s=wait_s)
        if self._rows.grammars.compiling:
            result.compiled = self._rows.grammars.pop_compiled(wait_s=wait_s)
        if self._adapters is not None:
            result.adapters = self._adapters.pop_loaded(wait_s=wait_s)
        return result

    def _complete(self, result: StepResult, plan: StepPlan, began: float) -> StepResult:
        """Adds draft tokens, the time since `began` and memory counts to a step's result."""
        if self._draft is not None and plan.rows:
            self._draft.follow(plan.rows, result.rows)
        result.busy_s = time.perf_counter() - began
        if self.cache_engine.block_map is not None:
            result.kv_bytes = self.cache_engine.block_map.num_bytes
        if self._runners.streaming:
            result.weights = self._runners.get_arrivals()
        if self._kv_counters is not None:
            result.counters = dict(self._kv_counters())
        if self._runners.compiles and (late := self._runners.num_late_compilations):
            result.counters = (result.counters or {}) | {LATE_COMPILATIONS: late}
        return result

    @property
    def progress(self) -> int:
        drafted = 0 if self._draft is None else self._draft.runnable.progress
        encoded = 0 if self._media is None else self._media.progress
        return drafted + encoded + sum(runnable.progress for runnable in self._runners.runnables)

    def _apply(self, plan: StepPlan) -> float:
        """Applies a plan to rows and blocks; returns the seconds spent moving blocks.

        Blocks are moved out before their memory is freed, and moved in after they have new memory.
        Tables are shortened before anything can fail, since later plans rely on it.
        """
        block_map, rows, faults = self.cache_engine.block_map, self._rows, self._faults
        for table in plan.table_lengths:
            rows.shorten_table(table, block_map)
        if plan.compiles:
            rows.grammars.begin(plan.compiles)
        if plan.adapters:
            assert self._adapters is not None, "the frontend rejects adapters here"
            self._adapters.begin(plan.adapters)
        num_out, moved_s = 0, 0.0
        if plan.moves:
            while num_out < len(plan.moves) and plan.moves[num_out].kind != "swap_in":
                num_out += 1
            moved_s = self._move(plan.moves[:num_out])
        for request_id in plan.freed_rows:
            rows.free(request_id, block_map)
            faults.failed.pop(request_id, None)
        if self._adapters is not None:
            self._adapters.await_slots(new.adapter_slot for new in plan.new_rows)
        for new in plan.new_rows:
            try:
                rows.add(new)
            except Exception as error:
                faults.add(new.request_id, error)
        for row in plan.rows:
            if row.new_block_ids or row.replaced_blocks:
                try:
                    rows.update_tables(row, block_map)
                except Exception as error:
                    faults.add(row.request_id, error)
        return moved_s + self._move(plan.moves[num_out:]) if plan.moves else moved_s

    def _begin_connector(self, plan: StepPlan) -> None:
        """Passes the connector its part of the plan after the plan's moves."""
        if plan.connector is not None and self._connector is not None:
            self._connector.begin(plan.connector)
        if self._layers is not None:
            self._layers.set_plan(plan.connector)

    def _move(self, moves: Sequence[BlockMove]) -> float:
        began = time.perf_counter()
        self.cache_engine.apply(moves)
        return time.perf_counter() - began

    def start_profile(self) -> None:
        self._runners.runnables[0].start_profile()

    def stop_profile(self) -> Profile:
        return self._runners.runnables[0].stop_profile()

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()
        self._rows.grammars.close()
        self._rows.sampling.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._media is not None:
            self._media.close()
        self._close()


def _in_order(
    rows: Sequence[ScheduledRequest], results: Sequence[RowResult], failures: Failures
) -> list[RowResult]:
    """Returns one result for each request, in order: its failure, or the first of its `results`, in
    which failures of an encoder precede results of the decoder.
    """
    results_by_id = dict(failures)
    for result in results:
        results_by_id.setdefault(result.request_id, result)
    return [results_by_id[row.request_id] for row in rows]
