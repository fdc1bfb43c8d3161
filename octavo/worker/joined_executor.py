"""Executor for engines that share experts: all of them compute each step together.

A plan with rows begins the next common step; a dummy step takes part in a step that another engine
has begun. Any failure ends the engine, since the other engines wait for it within the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from octavo.api.errors import EngineDead, OctavoError
from octavo.api.outputs import Profile
from octavo.engine.protocol.ports import Launched
from octavo.engine.protocol.step import StepPlan, StepResult
from octavo.worker.engine_links import EngineLinks
from octavo.worker.ranks.ranked_worker import RankedWorker
from octavo.worker.stages.pipelined_worker import PipelinedWorker
from octavo.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class JoinedStep:
    """A launched common step. Implements `ports.Launched`."""

    step: Launched
    ended_by: Callable[[Exception], EngineDead]

    def result(self) -> StepResult:
        try:
            return self.step.result()
        except Exception as error:
            raise self.ended_by(error) from error


class JoinedExecutor:
    """Implements `ports.AsyncExecutor`, `ports.Profiler`, `ports.Losable` and
    `ports.SharedStepExecutor`.
    """

    def __init__(
        self, executor: Worker | RankedWorker | PipelinedWorker, links: EngineLinks
    ) -> None:
        self._executor = executor
        self._links = links

    @property
    def progress(self) -> int:
        return self._executor.progress

    def execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._executor.execute(self._join(plan))
        except Exception as error:
            raise self._ended_by(error) from error

    def launch(self, plan: StepPlan) -> JoinedStep:
        assert isinstance(self._executor, PipelinedWorker), "others compute a step at a time"
        try:
            return JoinedStep(self._executor.launch(self._join(plan)), self._ended_by)
        except Exception as error:
            raise self._ended_by(error) from error

    @property
    def is_behind(self) -> bool:
        return self._links.is_behind

    def when_called(self, on_call: Callable[[], None]) -> None:
        self._links.when_called(on_call)

    def when_lost(self, on_loss: Callable[[OctavoError], None]) -> None:
        self._links.when_lost(on_loss)
        if not isinstance(self._executor, Worker):
            self._executor.when_lost(on_loss)

    def start_profile(self) -> None:
        self._executor.start_profile()

    def stop_profile(self) -> Profile:
        return self._executor.stop_profile()

    def close(self) -> None:
        self._links.close()
        self._executor.close()

    def _join(self, plan: StepPlan) -> StepPlan:
        """Returns the plan to execute. If it computes a step, notifies the other engines."""
        if not plan.rows and not self._links.is_behind:
            return plan
        self._links.begin()
        return plan if plan.rows else msgspec.structs.replace(plan, is_dummy_step=True)

    def _ended_by(self, error: Exception) -> EngineDead:
        """Returns the error to raise after a failure: another engine's end, if that is the
        cause.
        """
        lost = self._links.await_loss() if isinstance(error, EngineDead) else None
        if isinstance(lost, EngineDead):
            return lost
        if isinstance(error, EngineDead):
            return error
        return EngineDead(
            f"a step of the expert-parallel engines has failed: {type(error).__name__}: {error}"
        )
