"""A step of one Program as it is ready to be computed: the order of its rows, and their arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import Computing
from octavo.backends.batch import SamplingBatch, StepBatch
from octavo.step import ScheduledRow
from octavo.worker.checked_draws import CheckedDraws
from octavo.worker.guessed_draws import StepRows


@dataclass(slots=True)
class Layout:
    """The order of a step's rows: `R` requests with `T` tokens, end to end."""

    rows: NDArray[np.intp]
    """Permanent row of each request, `[R]`."""
    ends: NDArray[np.int32]
    """Number of tokens of each request once this step's are computed, `[R]`; of a guess that
    branches those of its first path."""
    query_starts: NDArray[np.int32]
    """First token of each request within the step, `[R+1]`."""
    step_rows: StepRows
    """All rows of the step, those of further paths of guesses too."""
    draws: list[int]
    """Index in R of each draw; a request with guesses draws once more after each of them."""
    draw_ends: NDArray[np.int32]
    """Number of tokens before each draw."""
    draw_places: NDArray[np.int32]
    """Token of the step after which each draw is made."""
    targets: list[tuple[int, int, int]]
    """Runs of tokens whose successors in the prompt want a logprob: index in R, first token, one
    past the last.
    """
    listed: list[tuple[int, NDArray[np.int32]]]
    """Tokens whose logprobs draws want besides: index of the draw, ids."""
    max_num_tokens: list[int]
    """Most tokens that each request with a grammar may come to, `[R]`; 0 of others."""
    searches: list[bool]
    """Whether each request is a row of a beam search, `[R]`."""

    def target_entries(self) -> Iterator[tuple[int, range]]:
        """Yields the index in R and the entries in S of each request with targets."""
        first = len(self.draws)
        for index, start, end in self.targets:
            yield index, range(first, first + end - start)
            first += end - start

    def listed_entries(self) -> Iterator[tuple[int, range]]:
        """Yields the draws that want tokens' logprobs, each with the entries in S of these."""
        first = len(self.draws) + sum(end - start for _, start, end in self.targets)
        for draw, ids in self.listed:
            yield draw, range(first, first + len(ids))
            first += len(ids)


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step's arrays, ready to be run or launched."""

    scheduled: Sequence[ScheduledRow]
    batch: StepBatch
    layout: Layout
    sampling: SamplingBatch
    checks: CheckedDraws | None
    """Draws that are checked once they are made."""

    def is_restricted(self, entry: int) -> bool:
        """Returns whether something bans tokens of a sampled row."""
        sampling = self.sampling
        return bool(
            sampling.records["allowed_mask"][entry] >= 0
            or sampling.bias_starts[entry + 1] > sampling.bias_starts[entry]
            or (self.checks is not None and entry in self.checks)
        )


@dataclass(frozen=True, slots=True)
class LaunchedRows:
    """A step that the device computes, and how to read its results."""

    step: PreparedStep
    computing: Computing
