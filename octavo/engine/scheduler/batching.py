"""How many waiting requests may start in this step: all that fit, or, for comparison, batches that
run to their end before the next one starts.

Each policy returns a number; none knows blocks or reads a clock. `static` takes what waits once the
last batch has ended; `dynamic` waits up to a window for the batch to fill; `none` takes one request
at a time. The delay keeps prompts that cannot be chunked from starving requests that decode.
Sources: continuous batching (Orca, Yu et al. 2022), which these are compared with; the delay factor
is vLLM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["continuous", "static", "dynamic", "none"]


@dataclass(frozen=True, slots=True)
class PromptStep:
    """The last step that computed a prompt's tokens; times in seconds."""

    ended: float = -math.inf
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchingState:
    """State of the queues when a step is planned, by which a rule says how many may start."""

    now: float
    num_running: int
    """Rows of running and swapped requests; a swapped one still belongs to the batch."""
    num_waiting: int
    arrival_time: float
    """When the request arrived that has waited longest."""
    last_prompt: PromptStep


class Batching(Protocol):
    """A rule by which waiting requests start."""

    @property
    def max_num_seqs(self) -> int:
        """Most rows of a batch."""
        ...

    def room(self, state: BatchingState) -> int:
        """Returns how many rows may start."""
        ...

    def opens_at(self, state: BatchingState) -> float:
        """Returns when there will be room if nothing else happens."""
        ...


@dataclass(frozen=True, slots=True)
class ContinuousBatching:
    """Requests start whenever there is a place."""

    max_num_seqs: int

    def room(self, state: BatchingState) -> int:
        return self.max_num_seqs - state.num_running

    def opens_at(self, state: BatchingState) -> float:
        return state.now


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """A batch starts when the last one has ended, and is full or has waited `window_s`. With a
    window of 0 it is what waits then; with one place there is no batch at all.
    """

    max_num_seqs: int
    window_s: float = 0.0

    def room(self, state: BatchingState) -> int:
        if state.num_running or self.opens_at(state) > state.now:
            return 0
        return self.max_num_seqs

    def opens_at(self, state: BatchingState) -> float:
        if state.num_waiting >= self.max_num_seqs:
            return state.now
        return state.arrival_time + self.window_s


@dataclass(frozen=True, slots=True)
class DelayedBatching:
    """Lets running requests go on alone after a step with a prompt, for `factor` times as long as
    it took.

    vLLM counts from the first request's arrival instead, which holds back nothing once a queue has
    formed.
    """

    inner: Batching
    factor: float

    @property
    def max_num_seqs(self) -> int:
        return self.inner.max_num_seqs

    def room(self, state: BatchingState) -> int:
        alone_until = state.last_prompt.ended + self.factor * state.last_prompt.took_s
        return 0 if state.num_running and state.now < alone_until else self.inner.room(state)

    def opens_at(self, state: BatchingState) -> float:
        return self.inner.opens_at(state)


def build_batching(
    kind: Kind, *, max_num_seqs: int, window_s: float, delay_factor: float
) -> Batching:
    """Returns the rule of that name; a `delay_factor` of 0 delays nothing."""
    batching: Batching = ContinuousBatching(max_num_seqs)
    if kind != "continuous":
        batching = StaticBatching(
            1 if kind == "none" else max_num_seqs, window_s if kind == "dynamic" else 0.0
        )
    return DelayedBatching(batching, delay_factor) if delay_factor else batching
