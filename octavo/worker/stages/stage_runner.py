"""Runs steps of a Program that makes hidden states for another stage, and hands them on.

Knows rows and arrays; draws nothing. The tokens that the last stage draws come back through
`RequestRows.learn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from octavo.backends.base import JoiningRunnable, Runnable
from octavo.backends.batch import StepBatch
from octavo.backends.kv import KvCache
from octavo.step import RowResult, ScheduledRow
from octavo.worker.request_rows import RequestRows
from octavo.worker.stages.stage_link import StageLink
from octavo.worker.step_arrays import Spans, gather


@dataclass(frozen=True, slots=True)
class StageStep:
    """A step's arrays, ready to be run."""

    scheduled: Sequence[ScheduledRow]
    batch: StepBatch


class StageRunner:
    """Runs steps of one stage but the last, over the KV of its own layers."""

    def __init__(self, runnable: Runnable, kv: KvCache, rows: RequestRows, link: StageLink) -> None:
        self.runnable = runnable
        self._kv = kv
        self._rows = rows
        self._link = link

    def prepare(self, scheduled: Sequence[ScheduledRow]) -> StageStep:
        """Gathers the arrays of a step; changes no row."""
        spans = Spans(
            self._rows.indices(scheduled),
            np.array([row.start + row.num_tokens for row in scheduled], np.int32),
            np.array([0, *accumulate(row.num_tokens for row in scheduled)], np.int32),
        )
        batch = gather(self._rows, spans)
        if self._link.before is not None:
            batch.hidden = self._link.before.of(scheduled)
        return StageStep(scheduled, batch)

    def join(self) -> None:
        """Computes a step of no rows, whose experts compute those of other engines."""
        assert isinstance(self.runnable, JoiningRunnable), "other backends are refused"
        self.runnable.join(self._kv)

    def run(self, step: StageStep) -> list[RowResult]:
        """Computes a step and hands its hidden states on; returns results without tokens."""
        hidden = self.runnable.run(step.batch, self._kv).arrays["hidden"]
        assert self._link.behind is not None, "the last stage draws"
        self._link.behind.send(step.scheduled, hidden)
        return [RowResult(row.request_id, num_kept=row.num_tokens) for row in step.scheduled]
