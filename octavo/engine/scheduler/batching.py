"""Batching rules: how many waiting requests may start in a step. Continuous batching starts all
that fit; the others, for comparison, run a batch to its end before the next one starts.

`static` starts the waiting requests once the last batch has ended; `dynamic` waits up to `window_s`
for the batch to fill; `none` runs one request at a time. The delay keeps prompts that cannot be
chunked from starving decoding requests. Sources: continuous batching is Orca (Yu et al. 2022); the
delay factor is vLLM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["continuous", "static", "dynamic", "none"]


@dataclass(frozen=True, slots=True)
class PromptStep:
    """The last step that computed prompt tokens; times in seconds."""

    ended: float = -math.inf
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchingState:
    """State of the queues when a step is scheduled."""

    now: float
    num_running: int
    """Number of rows of running and swapped requests; a swapped request still belongs to the
    batch.
    """
    num_waiting: int
    arrival_time: float
    """Arrival time of the request that has waited longest."""
    last_prompt: PromptStep


class Batching(Protocol):
    """A rule for starting waiting requests."""

    @property
    def max_num_seqs(self) -> int: ...

    def room(self, state: BatchingState) -> int:
        """Returns how many rows may start."""
        ...

    def opens_at(self, state: BatchingState) -> float:
        """Returns when there will be room if nothing else happens."""
        ...


@dataclass(frozen=True, slots=True)
class ContinuousBatching:
    """Requests start whenever there is room."""

    max_num_seqs: int

    def room(self, state: BatchingState) -> int:
        return self.max_num_seqs - state.num_running

    def opens_at(self, state: BatchingState) -> float:
        return state.now


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """A batch starts when the last one has ended, once it is full or has waited `window_s`."""

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
    """After a step with prompt tokens, no other such step starts for `factor` times its duration.

    vLLM counts from the first request's arrival instead, which delays nothing once a queue has
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
) -> Batching | None:
    """Returns the batching rule of that name. Returns None for continuous batching without a
    delay.
    """
    if kind == "continuous" and not delay_factor:
        return None
    batching: Batching = ContinuousBatching(max_num_seqs)
    if kind != "continuous":
        batching = StaticBatching(
            1 if kind == "none" else max_num_seqs, window_s if kind == "dynamic" else 0.0
        )
    return DelayedBatching(batching, delay_factor) if delay_factor else batching
