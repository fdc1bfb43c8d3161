"""Runs the steps of a pipeline stage other than the last, and sends its hidden states to the next
stage.

Samples nothing: the tokens that the last stage samples arrive through `InputBatch.write_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.protocol.step import RowResult, ScheduledRequest
from octavo.executor.base import Runnable
from octavo.executor.batch import StepOutput
from octavo.executor.kv import KvCache
from octavo.worker.input_batch import InputBatch
from octavo.worker.model_input import ModelInput, ProgramRunner, gather_scheduled
from octavo.worker.stages.stage_link import StageLink


class StageRunner(ProgramRunner):
    """Runs steps of a stage other than the last, using the KV of its layers."""

    def __init__(self, runnable: Runnable, kv: KvCache, rows: InputBatch, link: StageLink) -> None:
        super().__init__(runnable, kv, rows)
        self._link = link

    def prepare_inputs(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the arrays of a step; changes no row."""
        model_input = gather_scheduled(self._rows, scheduled)
        model_input.runner = self
        if self._link.before is not None:
            model_input.hidden = self._link.before.get(scheduled)
        return [model_input]

    def results(self, model_input: ModelInput, output: StepOutput) -> list[RowResult]:
        """Sends hidden states to the next stage; returns results without tokens."""
        scheduled = model_input.scheduled
        assert self._link.behind is not None, "the last stage samples"
        self._link.behind.send(scheduled, output.arrays["hidden"])
        return [RowResult(row.request_id, num_kept=row.num_tokens) for row in scheduled]
