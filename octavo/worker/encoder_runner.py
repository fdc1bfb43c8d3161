"""Runs the encoder before a decoder over the inputs of requests, once for each of them.

What it leaves are the keys and values that the decoder attends to; knows rows and arrays, nothing
of queues, blocks' owners or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.backends.base import AsyncRunnable, Runnable
from octavo.backends.batch import StepBatch, StepOutput
from octavo.backends.kv import KvCache
from octavo.step import RowResult, ScheduledRow
from octavo.worker.request_rows import RequestRows
from octavo.worker.step_arrays import gather_inputs

Failures = dict[str, RowResult]
"""Results of the requests whose input could not be encoded, by request id."""


@dataclass(frozen=True, slots=True)
class EncodingStep:
    """The arrays of the inputs that a step encodes, ready to be run or launched."""

    scheduled: Sequence[ScheduledRow]
    batch: StepBatch


class EncoderRunner:
    """Runs one encoder Program over the inputs of the requests that have a row."""

    def __init__(self, runnable: Runnable, kv: KvCache, rows: RequestRows) -> None:
        self.runnable = runnable
        self._kv = kv
        self._rows = rows

    def prepare(self, scheduled: Sequence[ScheduledRow]) -> EncodingStep | None:
        """Gathers the inputs that a step encodes, changing no row; None where there are none."""
        own = [row for row in scheduled if row.num_encoded]
        if not own:
            return None
        return EncodingStep(own, gather_inputs(self._rows, self._rows.indices(own)))

    def run(self, step: EncodingStep) -> Failures:
        """Encodes inputs; returns the failures among them."""
        return _failures(step, self.runnable.run(step.batch, self._kv))

    def launch(self, step: EncodingStep) -> Callable[[], Failures]:
        """Starts to encode inputs; returns what waits for the failures among them."""
        assert isinstance(self.runnable, AsyncRunnable), "only what is asynchronous is launched"
        computing = self.runnable.launch(step.batch, self._kv)
        return lambda: _failures(step, computing.result())


def _failures(step: EncodingStep, output: StepOutput) -> Failures:
    what = "the rows that the encoder made of the input hold what is not a number (NaN)"
    fit = np.isfinite(output.arrays["encoded"]).all(axis=1)
    return {
        row.request_id: RowResult(row.request_id, failure=what)
        for row, is_fit in zip(step.scheduled, fit.tolist(), strict=True)
        if not is_fit
    }
