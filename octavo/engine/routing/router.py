"""Routes requests to engines by a policy, and tracks the load and cached blocks that policies read.

Not thread-safe; times are arguments, on any monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.engine.routing.job import RoutingJob
from octavo.engine.routing.policies import RoutingPolicy
from octavo.engine.routing.target import Target


@dataclass(slots=True)
class PlacedJob:
    """An unfinished request that was sent to an engine."""

    target: Target
    num_uncached: int
    num_held: int
    has_started: bool = False


class Router:
    """The engines of one fleet, and their requests."""

    def __init__(self, policy: RoutingPolicy, targets: Iterable[Target]) -> None:
        self.targets = list(targets)
        """All engines, including those that are currently unavailable."""
        self._policy = policy
        self._placed: dict[str, PlacedJob] = {}

    @property
    def needs_hashes(self) -> bool:
        """Whether the policy needs the block hashes of jobs."""
        return self._policy.needs_hashes

    def choose(self, job: RoutingJob, allowed: Iterable[int], now: float) -> int:
        """Returns the index of the target for a request; `allowed` contains at least one index."""
        indices = list(allowed)
        chosen = self._policy.choose(job, [self.targets[index] for index in indices], now)
        return next(index for index in indices if self.targets[index] is chosen)

    def sent(self, name: str, job: RoutingJob, index: int, now: float) -> int:
        """Records that a request was sent to a target, and the blocks that the target will have.
        Returns how many of its tokens are expected to be cached there.
        """
        target = self.targets[index]
        num_cached = job.num_cached(target.cached.num_known(job.names))
        num_uncached = job.num_tokens - num_cached
        target.cached.add(job.names)
        target.queue(num_uncached, now)
        target.held_tokens += job.num_tokens
        self._placed[name] = PlacedJob(target, num_uncached, job.num_tokens)
        return num_cached

    def record_tokens(self, name: str, num_tokens: int, now: float) -> None:
        """Records output tokens of a request; the first ones show that its prompt has been
        computed.
        """
        placed = self._placed.get(name)
        if placed is None or not num_tokens:
            return
        if not placed.has_started:
            placed.has_started = True
            placed.target.computed(placed.num_uncached, now)
        placed.num_held += num_tokens
        placed.target.held_tokens += num_tokens

    def ended(self, name: str) -> None:
        """Removes a request that has ended or has left its target."""
        placed = self._placed.pop(name, None)
        if placed is None:
            return
        placed.target.held_tokens -= placed.num_held
        if not placed.has_started:
            placed.target.queued_tokens -= placed.num_uncached
