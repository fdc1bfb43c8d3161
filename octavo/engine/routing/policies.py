"""Routing policies: each chooses one of the available engines, deterministically.

Sources: Mooncake (Qin et al. 2025) for cost by queue and cache; rendezvous hashing (Thaler and
Ravishankar 1998) for sticky sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Literal, Protocol

from octavo.engine.routing.job import RoutingJob
from octavo.engine.routing.target import Target

RoutingPolicyName = Literal["round_robin", "least_tokens", "sticky", "kv"]

OWN_WEIGHT = 4.0
"""Weight of the request's uncached tokens relative to queued tokens: computing what is cached
elsewhere delays other requests too.
"""


COPY_WEIGHT = 0.5
"""Weight of a token whose blocks are copied from a shared store, relative to a computed one.
Copying delays the request, more so over a slow link, but not the steps of other requests.
"""


class RoutingPolicy(Protocol):
    """Chooses an engine for a request."""

    needs_hashes: bool
    """Whether the policy reads the digests of a prompt's blocks."""

    def choose(self, job: RoutingJob, targets: Sequence[Target], now: float) -> Target:
        """Returns one of `targets`, which is not empty."""
        ...


class RoundRobin:
    """Round robin over the engines."""

    needs_hashes = False

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def choose(self, job: RoutingJob, targets: Sequence[Target], now: float) -> Target:
        newest = max(self._turns.values(), default=0)
        chosen = min(targets, key=lambda target: self._turns.get(target.label, 0))
        self._turns[chosen.label] = newest + 1
        return chosen


class LeastTokens:
    """Chooses the engine whose unfinished requests have the fewest tokens."""

    needs_hashes = False

    def choose(self, job: RoutingJob, targets: Sequence[Target], now: float) -> Target:
        return min(targets, key=lambda target: (target.held_tokens, target.sent_tokens))


class Sticky:
    """Sends all requests of a session to the same engine as long as it is available."""

    needs_hashes = False

    def choose(self, job: RoutingJob, targets: Sequence[Target], now: float) -> Target:
        return max(targets, key=lambda target: get_session_score(job.session, target.label))


class KvAware:
    """Chooses the engine that is expected to finish the prompt first: it minimizes the queued
    uncached tokens, plus the prompt's weighted uncached tokens, divided by the measured rate.

    If engines share a store, a less busy engine can load a prefix that another one computed; such
    tokens have a lower weight than computed ones.
    """

    needs_hashes = True

    def __init__(self, own_weight: float = OWN_WEIGHT) -> None:
        self._own_weight = own_weight

    def choose(self, job: RoutingJob, targets: Sequence[Target], now: float) -> Target:
        known = [target.rate for target in targets if target.rate is not None]
        usual = sum(known) / len(known) if known else 1.0
        cached = {
            target.label: job.num_cached(target.cached.num_known(job.names)) for target in targets
        }
        stored: dict[str, int] = {}
        """Maximum number of the prompt's tokens that any engine of each store has."""
        for target in targets:
            if target.pool:
                num_cached = max(stored.get(target.pool, 0), cached[target.label])
                stored[target.pool] = num_cached

        def cost(target: Target) -> tuple[float, int]:
            here = cached[target.label]
            copied = max(0, stored.get(target.pool, 0) - here)
            own = job.num_tokens - here - copied + COPY_WEIGHT * copied
            rate = usual if target.rate is None else target.rate
            return (target.backlog(now) + self._own_weight * own) / rate, target.sent_tokens

        return min(targets, key=cost)


ROUTING_POLICIES: Mapping[RoutingPolicyName, Callable[[], RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "least_tokens": LeastTokens,
    "sticky": Sticky,
    "kv": KvAware,
}


def get_session_score(session: bytes, label: str) -> bytes:
    """Returns an engine's score for a session; the engine with the highest score is chosen
    (rendezvous hashing).
    """
    key = label.encode()
    if len(key) > blake2b.MAX_KEY_SIZE:
        key = blake2b(key).digest()
    return blake2b(session, digest_size=8, key=key).digest()
