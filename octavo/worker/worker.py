"""The execution plane of one device: applies a plan to its rows and blocks, then runs it.
Implements `ports.AsyncExecutor`.

Decides nothing. A fault met while one row is prepared is that row's alone (`row_faults.py`); a
fault that a whole step raises is narrowed to the request that raises it, by running the step's rows
one by one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from octavo.errors import EngineDead
from octavo.kv_messages import BlockMove, ConnectorReport
from octavo.outputs import Profile
from octavo.step import AdapterLoaded, RowResult, ScheduledRow, StepPlan, StepResult
from octavo.worker.adapter_store import AdapterStore
from octavo.worker.cache_engine import CacheEngine
from octavo.worker.draft_model import DraftModel
from octavo.worker.kv_layers import LayerStreaming
from octavo.worker.program_runners import LaunchedParts, ProgramRunners
from octavo.worker.request_rows import RequestRows
from octavo.worker.row_faults import PreparedRows, RowFaults, describe
from octavo.worker.step_media import StepMedia

logger = logging.getLogger(__name__)

WAIT_S = 0.005
"""Upper bound, in seconds, for which a step that computes nothing holds up a request that arrives.
"""


RunRows = Callable[[Sequence[ScheduledRow]], list[RowResult]]


@dataclass(frozen=True, slots=True)
class LaunchedStepRows:
    """A plan's rows, of which the device computes those without a fault."""

    prepared: PreparedRows
    launched: LaunchedParts | None


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step that was launched and not taken in. Implements `ports.Launched`."""

    plan: StepPlan
    rows: LaunchedStepRows | list[RowResult]
    began: float
    moved_s: float
    take_in: Callable[[LaunchedStep], StepResult]
    not_encoded: list[bytes]

    def result(self) -> StepResult:
        return self.take_in(self)


class Worker:
    """Runs the plans of one engine on one device."""

    def __init__(
        self,
        runners: ProgramRunners,
        cache_engine: CacheEngine,
        rows: RequestRows,
        *,
        close: Callable[[], None],
        is_alone: bool = True,
        shares_steps: bool = False,
        adapters: AdapterStore | None = None,
        draft: DraftModel | None = None,
        media: StepMedia | None = None,
        streaming: LayerStreaming | None = None,
    ) -> None:
        """`is_alone`: there are no other ranks, which would not know of a step taken apart;
        `shares_steps`: there are other engines, whose experts compute its rows, and its own theirs.
        """
        self._runner = runners
        self._rows = rows
        self.cache_engine = cache_engine
        """The KV cache and the places of its blocks."""
        self._launched: deque[LaunchedStep] = deque()
        """Launched steps, in the order in which they are computed and taken in."""
        self._free_since = 0.0
        """Time at which the device had computed the last step taken in."""
        self._close = close
        self._is_alone = is_alone
        self._shares_steps = shares_steps
        self._adapters = adapters
        self._draft = draft
        self._media = media
        self._streaming = streaming
        self._faults = RowFaults(is_alone=is_alone)

    def execute(self, plan: StepPlan) -> StepResult:
        """Carries out a plan of one step and returns its result."""
        (result,) = self._execute(plan, self._step)
        return result

    def decode(self, plan: StepPlan) -> Generator[StepResult]:
        """Carries out a plan of several decode steps, one each time the iterator is advanced."""
        return self._execute(plan, self._decode_steps)

    def _execute(
        self, plan: StepPlan, compute: Callable[[StepPlan], Iterable[list[RowResult]]]
    ) -> Generator[StepResult]:
        """Brings rows and blocks to where the plan wants them, then yields a result for each step
        that `compute` yields.
        """
        not_encoded = self._encode(plan)
        began = time.perf_counter()
        moved_s = max(self._apply(plan), self.cache_engine.settle(plan.moves))
        self._begin_connector(plan)
        if self._streaming is not None:
            self._streaming.take(plan.connector)
        if plan.joins:
            self._runner.join()
        waits = not plan.rows
        for num_done, results in enumerate(compute(plan)):
            if self._draft is not None and plan.rows:
                self._draft.follow(plan.rows, results)
            result = StepResult(
                plan.step,
                results,
                time.perf_counter() - began,
                kv_bytes=self.cache_engine.places.num_bytes,
                weights=self._runner.arrivals,
                spilled=self.cache_engine.spilled,
            )
            if num_done == 0:
                result.moved_s, result.not_encoded = moved_s, not_encoded
                result.connector = self._report(waits=waits)
                result.compiled = self._compiled(waits=waits)
                result.adapters = self._loaded(waits=waits)
            yield result
            began = time.perf_counter()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts a plan on an asynchronous runnable; the result is waited for later."""
        not_encoded = self._encode(plan)
        began = time.perf_counter()
        moved_s = self._apply(plan)
        step = LaunchedStep(
            plan,
            self._launch(plan.rows) if plan.rows else [],
            began,
            moved_s,
            self._take_in,
            not_encoded,
        )
        self._launched.append(step)
        return step

    def _launch(self, rows: Sequence[ScheduledRow]) -> LaunchedStepRows | list[RowResult]:
        """Returns the results at once where the rows had to be run one by one."""
        try:
            return self._launch_together(rows)
        except Exception:
            logger.exception(
                "a step of %d requests could not be launched; running them one by one", len(rows)
            )
            # Rows that are `from_device` need the tokens of the steps before on the host.
            for earlier in self._launched:
                earlier.rows = self._results_of(earlier, [])
            return [result for row in rows for result in self._run([row], self._run_again)]

    def _launch_together(
        self, rows: Sequence[ScheduledRow], *, all_known: bool = False
    ) -> LaunchedStepRows:
        prepared = self._faults.prepare(rows, self._runner.prepare)
        step = prepared.step
        return LaunchedStepRows(
            prepared, None if step is None else self._runner.launch(step, all_known=all_known)
        )

    def _wait_for(self, rows: LaunchedStepRows) -> list[RowResult]:
        launched = rows.launched
        return rows.prepared.in_order([] if launched is None else self._runner.take_in(launched))

    def _run_again(self, rows: Sequence[ScheduledRow]) -> list[RowResult]:
        """Computes rows once the steps before are taken in: the last tokens on the device may be
        those of a step that failed.
        """
        return self._wait_for(self._launch_together(rows, all_known=True))

    def _run_now(self, rows: Sequence[ScheduledRow]) -> list[RowResult]:
        prepared = self._faults.prepare(rows, self._runner.prepare)
        if prepared.step is None and self._shares_steps:
            self._runner.join()
        if prepared.step is None:
            return prepared.in_order([])
        streaming = self._streaming
        with contextlib.nullcontext() if streaming is None else streaming.during(prepared.step):
            return prepared.in_order(self._runner.run(prepared.step))

    def _take_in(self, step: LaunchedStep) -> StepResult:
        first = self._launched.popleft()
        assert first is step, "steps are taken in in the order of their launches"
        results = self._results_of(step, self._launched)
        moved_s = max(step.moved_s, self.cache_engine.settle(step.plan.moves))
        now = time.perf_counter()
        # A step waits for the one before it: it is busy from that one's end at the earliest.
        busy_s, self._free_since = now - max(step.began, self._free_since), now
        self._begin_connector(step.plan)
        waits = not step.plan.rows
        return StepResult(
            step.plan.step,
            results,
            busy_s,
            min(moved_s, busy_s),
            connector=self._report(waits=waits),
            kv_bytes=self.cache_engine.places.num_bytes,
            compiled=self._compiled(waits=waits),
            adapters=self._loaded(waits=waits),
            not_encoded=step.not_encoded,
        )

    def _results_of(
        self, step: LaunchedStep, launched_on_it: Iterable[LaunchedStep]
    ) -> list[RowResult]:
        """Waits for a step's results. A step that fails after its launch is computed again, and so
        are those launched on top of it, whose last tokens were no good.
        """
        if isinstance(step.rows, list):
            return step.rows
        try:
            return self._wait_for(step.rows)
        except Exception:
            logger.exception(
                "a step of %d requests failed after its launch; computing it again",
                len(step.plan.rows),
            )
        results = self._run(step.plan.rows, self._run_again)
        for later in launched_on_it:
            later.rows = self._run(later.plan.rows, self._run_again) if later.plan.rows else []
        return results

    @property
    def progress(self) -> int:
        drafted = 0 if self._draft is None else self._draft.runnable.progress
        encoded = 0 if self._media is None else self._media.progress
        return drafted + encoded + sum(runnable.progress for runnable in self._runner.runnables)

    def _apply(self, plan: StepPlan) -> float:
        """Brings rows and blocks to where the plan wants them; returns for how many seconds blocks
        were moved.

        Blocks move out before their places are given up, and in when they have new ones. Tables
        are shortened before anything can fail: later plans count on it.
        """
        places = self.cache_engine.places
        for end in plan.table_ends:
            self._rows.shorten_table(end, places)
        self._rows.grammars.begin(plan.compiles)
        if plan.adapters:
            assert self._adapters is not None, "the front refuses adapters here"
            self._adapters.begin(plan.adapters)
        returning = next(
            (index for index, move in enumerate(plan.moves) if move.kind == "swap_in"),
            len(plan.moves),
        )
        moved_s = self._move(plan.moves[:returning])
        for request_id in plan.freed_rows:
            self._rows.free(request_id, places)
            self._faults.forget(request_id)
        if self._adapters is not None:
            self._adapters.await_slots(new.adapter_slot for new in plan.new_rows)
        for new in plan.new_rows:
            self._faults.set_up(new.request_id, partial(self._rows.add, new))
        for row in plan.rows:
            if row.new_block_ids or row.replaced_blocks:
                self._faults.set_up(row.request_id, partial(self._rows.update_tables, row, places))
        return moved_s + self._move(plan.moves[returning:])

    def _encode(self, plan: StepPlan) -> list[bytes]:
        """Encodes a plan's images; returns those that could not be encoded. What it takes is no
        part of the step's seconds, by which other steps are foretold.
        """
        return [] if self._media is None else self._media.apply(plan)

    def _begin_connector(self, plan: StepPlan) -> None:
        """Hands the connector its part of the plan, once the plan's moves are made."""
        if plan.connector is not None and self.cache_engine.connector is not None:
            self.cache_engine.connector.begin(plan.connector)

    def _move(self, moves: Sequence[BlockMove]) -> float:
        began = time.perf_counter()
        self.cache_engine.apply(moves)
        return time.perf_counter() - began

    def _report(self, *, waits: bool) -> ConnectorReport | None:
        """Returns the connector's report; a step that computes nothing `waits` a little for it."""
        connector = self.cache_engine.connector
        return None if connector is None else connector.report(wait_s=WAIT_S if waits else 0.0)

    def _compiled(self, *, waits: bool) -> list[bytes]:
        """Returns the grammars that are compiled; a step that computes nothing `waits` a little for
        one.
        """
        return self._rows.grammars.take_compiled(wait_s=WAIT_S if waits else 0.0)

    def _loaded(self, *, waits: bool) -> list[AdapterLoaded]:
        """Puts adapters that have been read into their slots; a step that computes nothing `waits`
        a little for one.
        """
        if self._adapters is None:
            return []
        return self._adapters.take_loaded(wait_s=WAIT_S if waits else 0.0)

    def _step(self, plan: StepPlan) -> Iterator[list[RowResult]]:
        yield self._run(plan.rows, self._run_now) if plan.rows else []

    def _decode_steps(self, plan: StepPlan) -> Iterator[list[RowResult]]:
        """Yields the rows of each decode step; where the first raises, or a row has a fault, those
        of one step by itself.
        """
        has_begun = False
        try:
            prepare = partial(self._runner.prepare, num_steps=plan.num_steps)
            prepared = self._faults.prepare(plan.rows, prepare)
            if prepared.step is not None and not prepared.failed:
                for results in self._runner.decode(prepared.step, plan.num_steps) or ():
                    has_begun = True
                    yield results
        except EngineDead:
            raise
        except Exception:
            if has_begun:
                raise
            logger.exception(
                "%d decode steps of %d requests failed; running one",
                plan.num_steps,
                len(plan.rows),
            )
        if not has_begun:
            yield from self._step(plan)

    def _run(self, rows: Sequence[ScheduledRow], run: RunRows) -> list[RowResult]:
        """Runs rows together; where that raises, one by one.

        A position that is computed twice gets the same KV written twice. With several ranks the
        fault goes on to the caller: the others would not know of a step taken apart.
        """
        if not self._is_alone:
            return run(rows)
        try:
            return run(rows)
        except EngineDead:
            raise
        except Exception as error:
            if len(rows) > 1:
                logger.exception("a step of %d requests failed; running them one by one", len(rows))
                return [result for row in rows for result in self._run([row], run)]
            logger.exception("request %s failed in a step", rows[0].request_id)
            return [RowResult(rows[0].request_id, failure=describe(error))]

    def start_profile(self) -> None:
        self._runner.runnables[0].start_profile()

    def stop_profile(self) -> Profile:
        return self._runner.runnables[0].stop_profile()

    def close(self) -> None:
        if self.cache_engine.connector is not None:
            self.cache_engine.connector.close()
        self._rows.grammars.close()
        self._rows.sampling.close()
        if self._adapters is not None:
            self._adapters.close()
        if self._media is not None:
            self._media.close()
        self._close()
