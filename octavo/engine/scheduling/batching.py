"""How many waiting requests may start in this step: all that fit, or, for comparison, batches that
run to their end before the next.

Each returns a number; none knows blocks or reads a clock. `static` takes what waits once the last
batch has ended; `dynamic` waits up to a window for the batch to fill; `none` takes one request at a
time. The delay keeps prompts that cannot be chunked from starving those that generate. Sources:
continuous batching (Orca, Yu et al. 2022), which these are compared with; the delay factor is
vLLM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["continuous", "static", "dynamic", "none"]


@dataclass(frozen=True, slots=True)
class PromptStep:
    """The last step that computed a prompt's tokens."""

    ended: float = -math.inf
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """Who is there when a step is planned."""

    now: float
    num_running: int
    """Swapped ones included: they are of the batch."""
    num_waiting: int
    arrival_time: float
    """Of whoever has waited longest."""
    last_prompt: PromptStep


class Batching(Protocol):
    @property
    def max_num_seqs(self) -> int:
        """Rows of a batch."""
        ...

    def room(self, crowd: Crowd) -> int:
        """Requests that may start."""
        ...

    def opens_at(self, crowd: Crowd) -> float:
        """When there will be room, if nothing else happens."""
        ...


@dataclass(frozen=True, slots=True)
class Continuous:
    max_num_seqs: int

    def room(self, crowd: Crowd) -> int:
        return self.max_num_seqs - crowd.num_running

    def opens_at(self, crowd: Crowd) -> float:
        return crowd.now


@dataclass(frozen=True, slots=True)
class Batches:
    """`window_s` 0: a batch is what waits. With `max_num_seqs` 1 there is no batch at all."""

    max_num_seqs: int
    window_s: float = 0.0

    def room(self, crowd: Crowd) -> int:
        if crowd.num_running or self.opens_at(crowd) > crowd.now:
            return 0
        return self.max_num_seqs

    def opens_at(self, crowd: Crowd) -> float:
        return (
            crowd.now
            if crowd.num_waiting >= self.max_num_seqs
            else crowd.arrival_time + self.window_s
        )


@dataclass(frozen=True, slots=True)
class Delayed:
    """After a step with a prompt, those that run go on alone for `factor` times as long as it took.

    vLLM counts from the first request's arrival instead, which holds back nothing once a queue has
    formed.
    """

    inner: Batching
    factor: float

    @property
    def max_num_seqs(self) -> int:
        return self.inner.max_num_seqs

    def room(self, crowd: Crowd) -> int:
        alone_until = crowd.last_prompt.ended + self.factor * crowd.last_prompt.took_s
        return 0 if crowd.num_running and crowd.now < alone_until else self.inner.room(crowd)

    def opens_at(self, crowd: Crowd) -> float:
        return self.inner.opens_at(crowd)


def build_batching(
    kind: Kind, *, max_num_seqs: int, window_s: float, delay_factor: float
) -> Batching:
    """`delay_factor` 0: no delay."""
    batching: Batching = Continuous(max_num_seqs)
    if kind != "continuous":
        batching = Batches(
            1 if kind == "none" else max_num_seqs, window_s if kind == "dynamic" else 0.0
        )
    return Delayed(batching, delay_factor) if delay_factor else batching
