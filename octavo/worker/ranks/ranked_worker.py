"""The first rank's worker and the other ranks as one executor.

Every plan is sent to all ranks, which compute it together; the first rank's result is returned.
"""

from __future__ import annotations

from octavo.api.outputs import Profile
from octavo.engine.protocol.step import StepPlan, StepResult
from octavo.worker.ranks.messages import Execute
from octavo.worker.ranks.other_ranks import OnLoss, OtherRanks
from octavo.worker.worker import Worker


class RankedWorker:
    """An executor over several ranks; raises EngineDead after the first failure of any rank.

    Implements `ports.Executor`, `ports.Profiler` and `ports.Losable`.
    """

    def __init__(self, worker: Worker, others: OtherRanks) -> None:
        self._worker = worker
        self._others = others

    @property
    def progress(self) -> int:
        return self._worker.progress

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.num_steps == 1, "only the first rank would know where several steps end"
        self._others.check()
        self._others.send(Execute(plan))
        try:
            return self._worker.execute(plan)
        except Exception as error:
            raise self._others.ended_by(error, "rank 0") from error

    def when_lost(self, on_loss: OnLoss) -> None:
        self._others.when_lost(on_loss)

    def start_profile(self) -> None:
        self._worker.start_profile()

    def stop_profile(self) -> Profile:
        return self._worker.stop_profile()

    def close(self) -> None:
        self._others.close()
        self._worker.close()
