"""Runs the encoder of an encoder-decoder model, once for each request's input.

Writes the keys and values that the decoder attends to. Works on rows and arrays; the scheduler owns
queues and block allocation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.engine.protocol.step import RowResult, ScheduledRequest
from octavo.executor.batch import StepOutput
from octavo.worker.model_input import ModelInput, ProgramRunner, gather_inputs


class EncoderRunner(ProgramRunner):
    """Runs one encoder Program over the inputs of the requests that have a row."""

    def prepare_inputs(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the inputs that a step encodes; [] if there are none."""
        own = [row for row in scheduled if row.num_encoded]
        if not own:
            return []
        model_input = gather_inputs(self._rows, self._rows.indices(own))
        model_input.runner, model_input.scheduled = self, own
        return [model_input]

    def results(self, model_input: ModelInput, output: StepOutput) -> list[RowResult]:
        """Returns the failures of requests whose input could not be encoded."""
        reason = "the rows that the encoder made of the input contain NaN"
        fit = np.isfinite(output.arrays["encoded"]).all(axis=1)
        return [
            RowResult(row.request_id, failure=reason)
            for row, is_fit in zip(model_input.scheduled, fit.tolist(), strict=True)
            if not is_fit
        ]
