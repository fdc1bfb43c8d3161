"""A step of one Program: its arrays and the requests that they were gathered from, and the base
class of what prepares, runs and launches it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import RowResult, ScheduledRequest
from octavo.executor.base import Computing, Runnable
from octavo.executor.batch import StepBatch, StepOutput
from octavo.executor.kv import KvCache
from octavo.worker.input_batch import InputBatch
from octavo.worker.sampling.sample_verifier import SampleVerifier

NO_ROWS = np.zeros(0, np.intp)
NO_SAMPLES = np.zeros(0, np.int32)


@dataclass(slots=True)
class ModelInput(StepBatch):
    """One step of a Program. Its requests and `D` samples stay on the host; the executor reads the
    arrays of `StepBatch`.

    `sample_rows` has the rows of the samples, then of the prompt tokens to score (`prompt_targets`)
    and of further tokens whose logprobs samples report (`logprob_targets`).
    """

    runner: ProgramRunner = field(init=False, repr=False)
    """Runner that prepared it."""
    scheduled: Sequence[ScheduledRequest] = ()
    rows: NDArray[np.intp] = field(default_factory=lambda: NO_ROWS)
    """Permanent row of each of `scheduled`, then of each further path of draft trees, `[R]`."""
    sample_owners: list[int] = field(default_factory=list)
    """Index in `scheduled` of each sample, `[D]`; one more per draft token."""
    owner_rows: NDArray[np.intp] = field(default_factory=lambda: NO_ROWS)
    """Permanent row of each sample, `[D]`."""
    sample_ends: NDArray[np.int32] = field(default_factory=lambda: NO_SAMPLES)
    """Number of tokens before each sample, `[D]`."""
    has_drafts: bool = False
    prompt_targets: Sequence[tuple[int, int, int]] = ()
    """Prompt tokens to score: index in `scheduled`, first token, one past the last."""
    logprob_targets: Sequence[tuple[int, NDArray[np.int32]]] = ()
    """Index of a sample, and the further tokens whose logprobs it reports."""
    verifier: SampleVerifier | None = None
    """Verifies the samples once they are made; None: none is to be verified."""


class ProgramRunner(ABC):
    """Runs one Program's share of a step over the KV of the requests that have a row."""

    def __init__(self, runnable: Runnable, kv: KvCache, rows: InputBatch) -> None:
        self.runnable = runnable
        self._kv = kv
        self._rows = rows

    @abstractmethod
    def prepare(
        self, scheduled: Sequence[ScheduledRequest], num_steps: int = 1
    ) -> list[ModelInput]:
        """Gathers the first of `num_steps` steps, as several inputs if the backend cannot run all
        rows at once. A step may be prepared again.
        """

    @abstractmethod
    def results(self, model_input: ModelInput, output: StepOutput) -> list[RowResult]:
        """Returns the results of computed requests, in order, and appends their sampled tokens."""

    def run(self, model_input: ModelInput) -> list[RowResult]:
        output = self.runnable.run(model_input, self._kv, model_input.verifier)
        return self.results(model_input, output)

    def launch(self, model_input: ModelInput, *, all_known: bool = False) -> Computing:
        """Starts a step without waiting for it. With `all_known` the tokens of the steps before
        are on the host already.
        """
        return self.runnable.launch(model_input, self._kv)

    def run_again(self, model_input: ModelInput) -> list[RowResult]:
        """Launches a step once the steps before have returned, and waits for its results."""
        computing = self.launch(model_input, all_known=True)
        return self.results(model_input, computing.result())

    def decode(self, model_input: ModelInput, num_steps: int) -> Iterator[list[RowResult]] | None:
        """Returns an iterator that computes up to `num_steps` decode steps, one each time it is
        advanced; None if these rows are computed one step at a time.
        """
        return None

    def join(self) -> None:
        """Computes a step without rows, whose experts compute those of other engines."""
        self.runnable.join(self._kv)
