"""Who goes first, and who gives way: the order of the waiting requests, as an object of its own so
that others can be written beside it.

Owns the waiting requests, in one queue for all (fcfs), one for each priority, or one for each
tenant (fair). Decides over requests only; knows neither blocks nor time. Source of the fair policy:
virtual token counters (Sheng et al. 2024, Fairness in Serving Large Language Models).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from octavo.engine.requests.request import Request

KeyT = TypeVar("KeyT")

KEPT_IDLE_TENANTS = 500
"""Idle tenants whose counters are remembered. There must be a bound, since any text in a request's
`user` field is a tenant.
"""


class Policy(Protocol):
    """Is told of everything that happens to a request, and asked for an order."""

    @property
    def counts_tokens(self) -> bool:
        """Whether `took` counts."""
        ...

    def __len__(self) -> int:
        """Returns how many requests wait."""
        ...

    def join(self, request: Request, *, first: bool = False) -> None:
        """Adds a waiting request, with `first` before its equals, as one that was preempted."""
        ...

    def leave(self, request: Request) -> None:
        """Removes a request that waits no more."""
        ...

    def order(self) -> Iterator[Request]:
        """Yields the waiting requests in the order in which they start. It is read only as far as
        requests can start, and `started` is called in between.
        """
        ...

    def oldest(self) -> Request | None:
        """Returns the request that arrived first, whichever starts first."""
        ...

    def started(self, request: Request) -> None:
        """Notes that a waiting request runs. A request that was swapped out has never stopped."""
        ...

    def stopped(self, request: Request) -> None:
        """Notes that a request runs no more: it has ended, or is computed again later."""
        ...

    def took(self, request: Request, num_tokens: int) -> None:
        """Notes that a request was given `num_tokens` new tokens."""
        ...

    def max_chunk(self, num_tokens: int) -> int:
        """Returns how many tokens of one prompt a step computes, `num_tokens` at most."""
        ...

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        """Returns the running requests in the order in which they share a step's tokens."""
        ...

    def victim(self, running: Sequence[Request]) -> Request:
        """Returns the running request that loses its blocks."""
        ...


class WaitingQueues(Generic[KeyT]):
    """Waiting requests in one queue for each key. Iterate over copies: empty queues are removed."""

    def __init__(self) -> None:
        self.by_key: dict[KeyT, OrderedDict[str, Request]] = {}
        self.num_requests = 0

    def add(self, key: KeyT, request: Request, *, first: bool) -> None:
        queue = self.by_key.setdefault(key, OrderedDict())
        queue[request.request_id] = request
        self.num_requests += 1
        if first:
            queue.move_to_end(request.request_id, last=False)

    def remove(self, key: KeyT, request: Request) -> None:
        queue = self.by_key[key]
        del queue[request.request_id]
        self.num_requests -= 1
        if not queue:
            del self.by_key[key]

    def oldest(self) -> Request | None:
        heads = (next(iter(queue.values())) for queue in self.by_key.values())
        return min(heads, key=lambda request: request.source.arrival_time, default=None)


class NoAccounting:
    """The part of a policy that keeps no account of what each request was given."""

    counts_tokens = False

    def started(self, request: Request) -> None:
        """Does nothing."""

    def stopped(self, request: Request) -> None:
        """Does nothing."""

    def took(self, request: Request, num_tokens: int) -> None:
        """Does nothing."""

    def max_chunk(self, num_tokens: int) -> int:
        return num_tokens


class FirstComeFirstServed(NoAccounting):
    """Requests start in the order of their arrival, a preempted one first; the running one that
    started last gives way.
    """

    def __init__(self) -> None:
        self._waiting: WaitingQueues[None] = WaitingQueues()

    def __len__(self) -> int:
        return self._waiting.num_requests

    def join(self, request: Request, *, first: bool = False) -> None:
        self._waiting.add(None, request, first=first)

    def leave(self, request: Request) -> None:
        self._waiting.remove(None, request)

    def order(self) -> Iterator[Request]:
        return iter(self._waiting.by_key.get(None, OrderedDict()).values())

    def oldest(self) -> Request | None:
        return self._waiting.oldest()

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        return running

    def victim(self, running: Sequence[Request]) -> Request:
        return running[-1]


class Priority(NoAccounting):
    """Requests of the lowest value start first, and of these the first to arrive; the last to
    start of the highest value gives way.
    """

    def __init__(self) -> None:
        self._waiting: WaitingQueues[int] = WaitingQueues()

    def __len__(self) -> int:
        return self._waiting.num_requests

    def join(self, request: Request, *, first: bool = False) -> None:
        self._waiting.add(request.source.priority, request, first=first)

    def leave(self, request: Request) -> None:
        self._waiting.remove(request.source.priority, request)

    def order(self) -> Iterator[Request]:
        for priority in sorted(self._waiting.by_key):
            yield from self._waiting.by_key[priority].values()

    def oldest(self) -> Request | None:
        return self._waiting.oldest()

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        return sorted(running, key=lambda request: request.source.priority)

    def victim(self, running: Sequence[Request]) -> Request:
        return max(reversed(running), key=lambda request: request.source.priority)


@dataclass(slots=True)
class Tenant:
    """A tenant's account with a fair policy."""

    weight: float
    counter: float
    """Tokens served over the weight; raised on return from idleness to where busy tenants stand."""
    num_waiting: int = 0
    num_running: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running


class Fair:
    """The tenant that was served least for its weight goes first; the last request to start of the
    one served most gives way.

    A prompt is charged when it starts, each new token when it is made. A tenant that returns from
    idleness takes up the counter of those that are served now, so that idle time is not saved up.
    At most `max_running` requests of a tenant run.
    """

    counts_tokens = True

    def __init__(self, *, weights: Mapping[str, float], max_running: int | None) -> None:
        self._waiting: WaitingQueues[str] = WaitingQueues()
        self._tenants: dict[str, Tenant] = {}
        self._weights = weights
        self._max_running = max_running
        self._served_now = 0.0
        """Counter of the tenant that started last, which a tenant that joins takes up."""
        self._num_present = 0
        """Number of tenants that have a request."""
        self._sweep_at = 2 * KEPT_IDLE_TENANTS

    def __len__(self) -> int:
        return self._waiting.num_requests

    @property
    def num_tenants(self) -> int:
        """Number of tenants whose counters are remembered."""
        return len(self._tenants)

    def join(self, request: Request, *, first: bool = False) -> None:
        tenant = self._tenant(request.source.tenant)
        if tenant.is_idle:
            tenant.counter = max(tenant.counter, self._served_now)
            self._num_present += 1
        tenant.num_waiting += 1
        self._waiting.add(request.source.tenant, request, first=first)

    def leave(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.num_waiting -= 1
        self._num_present -= tenant.is_idle
        self._waiting.remove(request.source.tenant, request)

    def order(self) -> Iterator[Request]:
        queues = {name: iter(queue.values()) for name, queue in self._waiting.by_key.items()}
        while open_names := [name for name in queues if self._may_run(self._tenants[name])]:
            name = min(open_names, key=lambda name: self._tenants[name].counter)
            request = next(queues[name], None)
            if request is None:
                del queues[name]
            else:
                yield request

    def oldest(self) -> Request | None:
        return self._waiting.oldest()

    def started(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.num_running += 1
        self._served_now = max(self._served_now, tenant.counter)
        if not request.has_run:
            tenant.counter += (request.num_tokens - request.num_computed_tokens) / tenant.weight

    def stopped(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.num_running -= 1
        self._num_present -= tenant.is_idle

    def took(self, request: Request, num_tokens: int) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.counter += num_tokens / tenant.weight

    def max_chunk(self, num_tokens: int) -> int:
        """Returns half of a step while another tenant has a request, so that its prompt can start
        beside this one.
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
        """Forgets idle tenants, those served least first; one that comes back then starts like a
        new one.
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
