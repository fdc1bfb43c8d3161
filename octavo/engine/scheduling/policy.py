"""Who goes first, and who gives way: the order of the waiting, as an object of its own so that
others can be written beside it.

Owns the waiting requests, in lanes: one for all (fcfs), one a priority, one a tenant (fair).
Decides over requests only; knows neither blocks nor time. Source of the fair policy: virtual token
counters (Sheng et al. 2024, Fairness in Serving Large Language Models).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from octavo.engine.requests.request import Request

KeyT = TypeVar("KeyT")

KEPT_IDLE_TENANTS = 500
"""Whose counters are remembered while they ask for nothing: any text in a request's `user` field is
a tenant.
"""


class Policy(Protocol):
    """Told of everything that happens to a request; asked for an order."""

    def __len__(self) -> int:
        """How many wait."""
        ...

    def join(self, request: Request, *, first: bool = False) -> None:
        """A request waits; with `first` before its equals (it was preempted)."""
        ...

    def leave(self, request: Request) -> None:
        """It waits no more."""
        ...

    def order(self) -> Iterator[Request]:
        """The waiting, those to start first in front; read only as far as requests can start,
        `started` told in between.
        """
        ...

    def oldest(self) -> Request | None:
        """Who has waited longest, whoever starts first."""
        ...

    def started(self, request: Request) -> None:
        """A waiting request runs; one that was swapped out has never stopped."""
        ...

    def stopped(self, request: Request) -> None:
        """It runs no more: ended, or to be computed again."""
        ...

    def took(self, request: Request, num_tokens: int) -> None:
        """It was given so many new tokens."""
        ...

    def max_chunk(self, num_tokens: int) -> int:
        """How many tokens of one prompt a step computes, `num_tokens` at most."""
        ...

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        """The running, in the order in which they share a step's tokens."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Which of the running loses its blocks."""
        ...


class Lanes(Generic[KeyT]):
    """Waiting requests by a key, each lane in its own order. Iterate over copies: lanes come and
    go.
    """

    def __init__(self) -> None:
        self.lanes: dict[KeyT, OrderedDict[str, Request]] = {}
        self.num_requests = 0

    def add(self, key: KeyT, request: Request, *, first: bool) -> None:
        lane = self.lanes.setdefault(key, OrderedDict())
        lane[request.request_id] = request
        self.num_requests += 1
        if first:
            lane.move_to_end(request.request_id, last=False)

    def remove(self, key: KeyT, request: Request) -> None:
        lane = self.lanes[key]
        del lane[request.request_id]
        self.num_requests -= 1
        if not lane:
            del self.lanes[key]

    def oldest(self) -> Request | None:
        heads = (next(iter(lane.values())) for lane in self.lanes.values())
        return min(heads, key=lambda request: request.source.arrival_time, default=None)


class Unshared:
    """What policies have in common that keep no account of who got what."""

    def started(self, request: Request) -> None:
        """No account is kept."""

    def stopped(self, request: Request) -> None:
        """No account is kept."""

    def took(self, request: Request, num_tokens: int) -> None:
        """No account is kept."""

    def max_chunk(self, num_tokens: int) -> int:
        return num_tokens


class FirstComeFirstServed(Unshared):
    """Waiting requests in their order (a preempted one stands in front); the youngest of the
    running gives way.
    """

    def __init__(self) -> None:
        self._lanes: Lanes[None] = Lanes()

    def __len__(self) -> int:
        return self._lanes.num_requests

    def join(self, request: Request, *, first: bool = False) -> None:
        self._lanes.add(None, request, first=first)

    def leave(self, request: Request) -> None:
        self._lanes.remove(None, request)

    def order(self) -> Iterator[Request]:
        return iter(self._lanes.lanes.get(None, OrderedDict()).values())

    def oldest(self) -> Request | None:
        return self._lanes.oldest()

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        return running

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]


class Priority(Unshared):
    """Lower values first, arrival breaks ties; the youngest of the highest value gives way."""

    def __init__(self) -> None:
        self._lanes: Lanes[int] = Lanes()

    def __len__(self) -> int:
        return self._lanes.num_requests

    def join(self, request: Request, *, first: bool = False) -> None:
        self._lanes.add(request.source.priority, request, first=first)

    def leave(self, request: Request) -> None:
        self._lanes.remove(request.source.priority, request)

    def order(self) -> Iterator[Request]:
        for priority in sorted(self._lanes.lanes):
            yield from self._lanes.lanes[priority].values()

    def oldest(self) -> Request | None:
        return self._lanes.oldest()

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        return sorted(running, key=lambda request: request.source.priority)

    def victim(self, running: Sequence[Request]) -> Request:
        return max(reversed(running), key=lambda request: request.source.priority)


@dataclass(slots=True)
class Tenant:
    """`counter`: tokens served over the tenant's weight, never behind those who were busy while it
    was not.
    """

    weight: float
    counter: float
    num_waiting: int = 0
    num_running: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running


class Fair:
    """The tenant that was served least, for its weight, goes first; the youngest request of the one
    served most gives way.

    A prompt is charged when it starts, each new token when it is made; a tenant that returns from
    idleness takes up the counter of those that are served now, so that idle time is not saved up.
    At most `max_running` requests of a tenant run.
    """

    def __init__(self, *, weights: Mapping[str, float], max_running: int | None) -> None:
        self._lanes: Lanes[str] = Lanes()
        self._tenants: dict[str, Tenant] = {}
        self._weights = weights
        self._max_running = max_running
        self._served_now = 0.0
        """The counter of the tenant that started last: where those who join take up."""
        self._num_present = 0
        """Tenants of whom a request waits or runs."""
        self._sweep_at = 2 * KEPT_IDLE_TENANTS

    def __len__(self) -> int:
        return self._lanes.num_requests

    def join(self, request: Request, *, first: bool = False) -> None:
        tenant = self._tenant(request.source.tenant)
        if tenant.is_idle:
            tenant.counter = max(tenant.counter, self._served_now)
            self._num_present += 1
        tenant.num_waiting += 1
        self._lanes.add(request.source.tenant, request, first=first)

    def leave(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.num_waiting -= 1
        self._num_present -= tenant.is_idle
        self._lanes.remove(request.source.tenant, request)

    def order(self) -> Iterator[Request]:
        lanes = {name: iter(lane.values()) for name, lane in self._lanes.lanes.items()}
        while open_names := [name for name in lanes if self._may_run(self._tenants[name])]:
            name = min(open_names, key=lambda name: self._tenants[name].counter)
            request = next(lanes[name], None)
            if request is None:
                del lanes[name]
            else:
                yield request

    def oldest(self) -> Request | None:
        return self._lanes.oldest()

    def started(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.num_running += 1
        self._served_now = max(self._served_now, tenant.counter)
        if not request.num_preemptions:
            tenant.counter += (request.num_tokens - request.num_computed_tokens) / tenant.weight

    def stopped(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.num_running -= 1
        self._num_present -= tenant.is_idle

    def took(self, request: Request, num_tokens: int) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.counter += num_tokens / tenant.weight

    def max_chunk(self, num_tokens: int) -> int:
        """Half of a step while another tenant waits or runs, so that the other's prompt starts
        beside it.
        """
        return num_tokens if self._num_present < 2 else -(-num_tokens // 2)

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        counters = {name: tenant.counter for name, tenant in self._tenants.items()}
        return sorted(running, key=lambda request: counters[request.source.tenant])

    def victim(self, running: Sequence[Request]) -> Request:
        return max(
            reversed(running), key=lambda request: self._tenants[request.source.tenant].counter
        )

    def _may_run(self, tenant: Tenant) -> bool:
        return self._max_running is None or tenant.num_running < self._max_running

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._sweep()
            tenant = self._tenants[name] = Tenant(self._weights.get(name, 1.0), self._served_now)
        return tenant

    def _sweep(self) -> None:
        """Forgets idle tenants, those served least first; who comes back after that starts as a new
        one does.
        """
        if len(self._tenants) < self._sweep_at:
            return
        idle = sorted(
            (name for name, tenant in self._tenants.items() if tenant.is_idle),
            key=lambda name: self._tenants[name].counter,
        )
        for name in idle[:-KEPT_IDLE_TENANTS]:
            del self._tenants[name]
        self._sweep_at = len(self._tenants) + KEPT_IDLE_TENANTS
