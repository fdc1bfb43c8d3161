"""One Program's rows in a step, as arrays: what every runner of a Program prepares, runs and
launches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import RowResult, ScheduledRequest
from octavo.executor.base import AsyncRunnable, Computing, JoiningRunnable, Runnable
from octavo.executor.batch import StepBatch, StepOutput
from octavo.executor.kv import KvCache
from octavo.worker.input_batch import InputBatch
from octavo.worker.sampling.draft_acceptance import StepRows
from octavo.worker.sampling.sample_verifier import SampleVerifier


@dataclass(slots=True)
class SampleLayout:
    """Positions of a step's `R` requests at which tokens are sampled or scored."""

    rows: NDArray[np.intp]
    """Permanent row of each request, `[R]`."""
    step_rows: StepRows
    """Rows of the step, including those of further paths of draft trees."""
    draws: list[int]
    """Index in R of each sample, `[D]`; a request with draft tokens has one more for each."""
    draw_rows: NDArray[np.intp]
    """Permanent row of each sample, `[D]`."""
    draw_ends: NDArray[np.int32]
    """Number of tokens before each sample, `[D]`."""
    draw_places: NDArray[np.int32]
    """Token of the step whose logits each sample reads, `[D]`."""
    targets: list[tuple[int, int, int]]
    """Prompt tokens to score: index in R, first token, one past the last."""
    listed: list[tuple[int, NDArray[np.int32]]]
    """Further tokens whose logprobs samples report: index of the sample, ids."""
    has_drafts: bool
    """Whether any request has draft tokens."""

    @property
    def num_samples(self) -> int:
        """Number of sampled rows, prompt tokens and listed ones included."""
        num_targets = sum(last - first for _, first, last in self.targets)
        return len(self.draws) + num_targets + sum(len(ids) for _, ids in self.listed)

    def target_entries(self) -> Iterator[tuple[int, range]]:
        """Yields the index in R and the sampled rows of each request with prompt targets."""
        first = len(self.draws)
        for index, start, end in self.targets:
            yield index, range(first, first + end - start)
            first += end - start

    def listed_entries(self) -> Iterator[tuple[int, range]]:
        """Yields each sample with listed tokens, and the sampled rows of these."""
        first = len(self.draws) + sum(end - start for _, start, end in self.targets)
        for draw, ids in self.listed:
            yield draw, range(first, first + len(ids))
            first += len(ids)


@dataclass(slots=True)
class ModelInput:
    """Arrays of one Program's rows in a step."""

    runner: ProgramRunner
    scheduled: Sequence[ScheduledRequest]
    batch: StepBatch
    rows: NDArray[np.intp]
    """Permanent row of each of `scheduled`."""
    layout: SampleLayout | None = None
    """Positions that are sampled; None for a Program that samples nothing."""
    verifier: SampleVerifier | None = None
    """Samples to verify once they are made."""


class ProgramRunner(ABC):
    """Runs one Program's rows of a step over the KV of the requests that have a row."""

    def __init__(self, runnable: Runnable, kv: KvCache, rows: InputBatch) -> None:
        self.runnable = runnable
        self._kv = kv
        self._rows = rows

    @abstractmethod
    def prepare(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the arrays of the first of `num_steps` steps, as several inputs if the backend
        cannot run all rows at once. A step may be prepared again.
        """

    @abstractmethod
    def results(self, model_input: ModelInput, output: StepOutput) -> list[RowResult]:
        """Returns the results of computed rows, in order, and appends sampled tokens to them."""

    def run(self, model_input: ModelInput) -> list[RowResult]:
        """Computes rows and returns their results."""
        return self.results(model_input, self.runnable.run(model_input.batch, self._kv))

    def launch(self, model_input: ModelInput, *, all_known: bool = False) -> Computing:
        """Starts a step without waiting for it. With `all_known` the tokens of the steps before
        are on the host already.
        """
        assert isinstance(self.runnable, AsyncRunnable), "only async backends launch steps"
        return self.runnable.launch(model_input.batch, self._kv)

    def run_again(self, model_input: ModelInput) -> list[RowResult]:
        """Launches rows once the steps before have returned, and waits for their results."""
        computing = self.launch(model_input, all_known=True)
        return self.results(model_input, computing.result())

    def decode(self, model_input: ModelInput, num_steps: int) -> Iterator[list[RowResult]] | None:
        """Returns an iterator that computes up to `num_steps` decode steps, one each time it is
        advanced; None if these rows are computed one step at a time.
        """
        return None

    def join(self) -> None:
        """Computes a step without rows, whose experts compute those of other engines."""
        assert isinstance(self.runnable, JoiningRunnable), "other backends are refused"
        self.runnable.join(self._kv)
