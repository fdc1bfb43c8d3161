"""The first rank's worker and the other ranks as one executor.

Every plan goes to all ranks, all compute it in step, and the first one's result counts.
"""

from __future__ import annotations

from octavo.errors import EngineDead, OctavoError
from octavo.outputs import Profile
from octavo.ports import Between
from octavo.step import StepPlan, StepResult
from octavo.worker.ranks.messages import Execute
from octavo.worker.ranks.other_ranks import OnLoss, OtherRanks
from octavo.worker.worker import Worker


class RankedWorker:
    """An executor over several ranks; raises EngineDead from the first fault of any of them on.

    Implements `ports.Executor`, `ports.Profiler` and `ports.Losable`.
    """

    def __init__(self, worker: Worker, others: OtherRanks) -> None:
        self._worker = worker
        self._others = others
        self._dead: EngineDead | None = None

    @property
    def progress(self) -> int:
        return self._worker.progress

    def execute(self, plan: StepPlan, between: Between | None = None) -> StepResult:
        assert plan.num_steps == 1, "only the first rank would know where several steps end"
        if self._others.lost is not None:
            self._die(self._others.lost)
        if self._dead is not None:
            raise self._dead
        self._others.send(Execute(plan))
        try:
            return self._worker.execute(plan, between)
        except Exception as error:
            self._die(self._others.wait_for_loss() or error)
            raise self._dead or error from error

    def when_lost(self, on_loss: OnLoss) -> None:
        self._others.when_lost(on_loss)

    def start_profile(self) -> None:
        self._worker.start_profile()

    def stop_profile(self) -> Profile:
        return self._worker.stop_profile()

    def close(self) -> None:
        self._others.close()
        self._worker.close()

    def _die(self, error: Exception) -> None:
        """Ends all other ranks: once out of step, none of them is of any use."""
        if self._dead is None:
            what = (
                error.message
                if isinstance(error, OctavoError)
                else f"rank 0 has failed: {type(error).__name__}: {error}"
            )
            self._dead = EngineDead(f"the engine can compute nothing any more: {what}")
            self._others.close(patience_s=0.0)
