"""The last stage's worker and the other stages as one executor, with one plan of each micro-batch
in flight.

A plan is sent to all stages when it is launched. The first stages compute it immediately; the last
one, in this process, computes it when its result is requested, and sends its sampled tokens to the
others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from octavo.api.outputs import Profile
from octavo.engine.protocol.step import StepPlan, StepResult
from octavo.worker.ranks.messages import AppendTokens, Execute, SampledTokens
from octavo.worker.ranks.other_ranks import OnLoss, OtherRanks
from octavo.worker.stages.stage_link import StageLink
from octavo.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class PipelinedStep:
    """A plan that the stages compute. Implements `ports.Launched`."""

    plan: StepPlan
    worker: PipelinedWorker

    def result(self) -> StepResult:
        return self.worker.finish(self)


class PipelinedWorker:
    """An executor over several stages; raises EngineDead after the first failure of any stage.

    Implements `ports.AsyncExecutor`, `ports.Profiler` and `ports.Losable`.
    """

    def __init__(self, worker: Worker, others: OtherRanks, link: StageLink) -> None:
        assert link.before is not None, "the last of several stages"
        self._worker = worker
        self._others = others
        self._before = link.before
        self._launched: deque[PipelinedStep] = deque()

    @property
    def progress(self) -> int:
        return self._worker.progress

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> PipelinedStep:
        assert plan.num_steps == 1, "a stage knows a token once the last one has sampled it"
        self._others.check()
        self._others.send(Execute(plan))
        self._launched.append(PipelinedStep(plan, self))
        return self._launched[-1]

    def finish(self, step: PipelinedStep) -> StepResult:
        """Computes the last stage of the oldest plan in flight."""
        self._others.check()
        first = self._launched.popleft()
        assert first is step, "steps return in the order of their launches"
        try:
            if step.plan.rows:
                self._before.receive()
            result = self._worker.execute(step.plan)
        except Exception as error:
            raise self._others.ended_by(error, "the last stage") from error
        sampled = [
            SampledTokens(row.request_id, row.start + row.num_tokens, computed.token_ids)
            for row, computed in zip(step.plan.rows, result.rows, strict=True)
            if computed.token_ids
        ]
        if sampled:
            self._others.send(AppendTokens(sampled))
        return result

    def when_lost(self, on_loss: OnLoss) -> None:
        self._others.when_lost(on_loss)

    def start_profile(self) -> None:
        """Measures only the last stage."""
        self._worker.start_profile()

    def stop_profile(self) -> Profile:
        return self._worker.stop_profile()

    def close(self) -> None:
        self._others.close()
        self._before.close()
        self._worker.close()
