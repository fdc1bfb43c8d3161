"""Request queues: which requests wait, run or are swapped out, the order in which waiting requests
start, and which running request is preempted.

Independent of blocks and time. Source of the fair policy: virtual token counters (Sheng et al.
2024, Fairness in Serving Large Language Models).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from octavo.engine.protocol.requests import BACKGROUND_PRIORITY
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.requests.request import Request, RequestStatus

KEPT_IDLE_TENANTS = 500
"""Maximum number of idle tenants whose counters are kept, since a request's `user` field may
contain any text.
"""
PRIORITY = attrgetter("source.priority")


def _is_background(request: Request) -> bool:
    return request.source.priority >= BACKGROUND_PRIORITY


def _get_tenant(request: Request) -> int | str:
    return BACKGROUND_PRIORITY if _is_background(request) else request.source.tenant


class WaitingQueue:
    """Waiting requests. The lowest priority value starts first; equal priorities (as under the
    policy fcfs) start in order of arrival. Of the running requests with the highest value, the last
    one to start is preempted.

    Background requests have the highest value: they start last and are preempted first.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self._queues: dict[int | str, OrderedDict[str, Request]] = {}
        """Requests by priority or, if ordered by tenants, by tenant."""
        self._key: Callable[[Request], int | str] = PRIORITY

    def add(self, request: Request, *, first: bool = False) -> None:
        """Adds a request; with `first` (after a preemption) before those with the same key."""
        queue = self._queues.setdefault(self._key(request), OrderedDict())
        queue[request.request_id] = request
        self.num_requests += 1
        if first:
            queue.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        key = self._key(request)
        del self._queues[key][request.request_id]
        self.num_requests -= 1
        if not self._queues[key]:
            del self._queues[key]

    def order(self) -> Iterator[Request]:
        """Yields the requests in the order in which they start. The caller stops when no further
        request can start, and starts each request before it reads the next.
        """
        for priority in sorted(self._queues):
            yield from self._queues[priority].values()

    def oldest(self) -> Request | None:
        """Returns the request that arrived first. Returns None if none waits."""
        heads = (next(iter(queue.values())) for queue in self._queues.values())
        return min(heads, key=lambda request: request.source.arrival_time, default=None)

    def max_chunk(self, num_tokens: int, running: Sequence[Request]) -> int:
        """Returns the maximum number of tokens of one prompt in a step: `num_tokens`, or half of it
        while a background request runs and another request waits, so that the latter can start in
        the same step.
        """
        is_behind = len(self._queues) > (BACKGROUND_PRIORITY in self._queues)
        if is_behind and any(map(_is_background, running)):
            return -(-num_tokens // 2)
        return num_tokens

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        """Returns running requests in the order in which they get a step's tokens."""
        return sorted(running, key=PRIORITY)

    def victim(self, running: Sequence[Request]) -> Request:
        """Returns the running request to preempt."""
        return max(reversed(running), key=PRIORITY)


@dataclass(slots=True)
class Tenant:
    """Account of a tenant in a fair queue."""

    weight: float
    counter: float
    """Tokens served divided by the weight. After idle time it is raised to the counters of busy
    tenants.
    """
    num_waiting: int = 0
    num_running: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.num_waiting and not self.num_running


class FairQueue(WaitingQueue):
    """Waiting requests with fair scheduling: the tenant with the lowest served tokens per weight
    starts first. For preemption: the last started request of the tenant with the highest.

    A prompt counts when it starts, each new token when it is sampled. A tenant that returns after
    idle time gets the counter of the active tenants, so that it cannot save up idle time. At most
    `max_running` requests of a tenant run. Background requests do not belong to a tenant.
    """

    def __init__(self, *, weights: Mapping[str, float], max_running: int | None) -> None:
        super().__init__()
        self._key = _get_tenant
        self._tenants: dict[str, Tenant] = {}
        self._weights = weights
        self._max_running = max_running
        self._served_now = 0.0
        """Counter of the tenant that started a request last; new tenants get this value."""
        self._num_present = 0
        """Number of tenants that have a request."""
        self._sweep_at = 2 * KEPT_IDLE_TENANTS

    @property
    def num_tenants(self) -> int:
        """Number of tenants whose counters are kept."""
        return len(self._tenants)

    def add(self, request: Request, *, first: bool = False) -> None:
        if not _is_background(request):
            tenant = self._tenant(request.source.tenant)
            if tenant.is_idle:
                tenant.counter = max(tenant.counter, self._served_now)
                self._num_present += 1
            tenant.num_waiting += 1
        super().add(request, first=first)

    def remove(self, request: Request) -> None:
        if not _is_background(request):
            tenant = self._tenants[request.source.tenant]
            tenant.num_waiting -= 1
            self._num_present -= tenant.is_idle
        super().remove(request)

    def order(self) -> Iterator[Request]:
        queues = {name: iter(queue.values()) for name, queue in self._queues.items()}
        background = queues.pop(BACKGROUND_PRIORITY, iter(()))
        while open_names := [
            name for name in queues if isinstance(name, str) and self._may_run(self._tenants[name])
        ]:
            name = min(open_names, key=lambda name: self._tenants[name].counter)
            request = next(queues[name], None)
            if request is None:
                del queues[name]
            else:
                yield request
        yield from background

    def max_chunk(self, num_tokens: int, running: Sequence[Request]) -> int:
        """Also returns half while another tenant has a request, so that its prompt can start in the
        same step.
        """
        num_tokens = super().max_chunk(num_tokens, running)
        return num_tokens if self._num_present < 2 else -(-num_tokens // 2)

    def ranked(self, running: Sequence[Request]) -> Sequence[Request]:
        return sorted(running, key=self._rank)

    def victim(self, running: Sequence[Request]) -> Request:
        return max(reversed(running), key=self._rank)

    def started(self, request: Request) -> None:
        """Counts the start of a request, and its prompt tokens. A swapped request still counts as
        started.
        """
        if _is_background(request):
            return
        tenant = self._tenants[request.source.tenant]
        tenant.num_running += 1
        self._served_now = max(self._served_now, tenant.counter)
        if not request.has_run:
            tenant.counter += (request.num_tokens - request.num_computed_tokens) / tenant.weight

    def stopped(self, request: Request) -> None:
        """Counts a request that has ended or was reset to waiting."""
        if not _is_background(request):
            tenant = self._tenants[request.source.tenant]
            tenant.num_running -= 1
            self._num_present -= tenant.is_idle

    def count(self, request: Request, num_tokens: int) -> None:
        """Counts new tokens of a request."""
        if not _is_background(request):
            tenant = self._tenants[request.source.tenant]
            tenant.counter += num_tokens / tenant.weight

    def _rank(self, request: Request) -> tuple[bool, float]:
        if _is_background(request):
            return True, 0.0
        return False, self._tenants[request.source.tenant].counter

    def _may_run(self, tenant: Tenant) -> bool:
        return self._max_running is None or tenant.num_running < self._max_running

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._sweep()
            tenant = self._tenants[name] = Tenant(self._weights.get(name, 1.0), self._served_now)
        return tenant

    def _sweep(self) -> None:
        """Removes idle tenants, those served least first; they start as new ones if they return."""
        if len(self._tenants) < self._sweep_at:
            return
        idle = sorted(
            (name for name, tenant in self._tenants.items() if tenant.is_idle),
            key=lambda name: self._tenants[name].counter,
        )
        for name in idle[:-KEPT_IDLE_TENANTS]:
            del self._tenants[name]
        self._sweep_at = len(self._tenants) + KEPT_IDLE_TENANTS


class RequestQueues:
    """All unfinished requests, each in exactly one state: waiting, running or swapped."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.waiting = waiting
        self.fair = waiting if isinstance(waiting, FairQueue) else None
        """The waiting queue if it is a FairQueue, else None."""
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        """Requests whose blocks are in host memory, most recently preempted first."""
        self.num_running_seqs = 0
        """Maximum number of rows that the running requests may have."""
        self.num_waiting_tokens = 0
        self.by_id: dict[str, Request] = {}

    @property
    def first_idle(self) -> Request | None:
        """The next request to run: the first swapped one, else the first waiting one; None if there
        are none.
        """
        return self.swapped[0] if self.swapped else next(self.waiting.order(), None)

    @property
    def num_batch_seqs(self) -> int:
        """Number of rows of the running and swapped requests."""
        num_seqs = self.num_running_seqs
        for request in self.swapped:
            num_seqs += request.num_seqs
        return num_seqs

    def set_gauges(self, stats: EngineStats) -> None:
        stats.num_running = self.num_running_seqs
        stats.num_swapped = len(self.swapped)
        stats.num_waiting = self.waiting.num_requests
        stats.num_waiting_tokens = self.num_waiting_tokens

    # -- state changes -----------------------------------------------------------------------------

    def add(self, request: Request, *, first: bool = False) -> None:
        """Adds a waiting request; `first`: before the others, after a preemption."""
        self.by_id[request.request_id] = request
        self.waiting.add(request, first=first)
        self.num_waiting_tokens += request.num_tokens

    def run(self, request: Request) -> None:
        """Moves a request to the running ones. A waiting one remains in its queue until
        `leave_waiting`.
        """
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.num_running_seqs += request.num_seqs

    def set_priority(self, request: Request, priority: int) -> None:
        """Changes a request's priority. A waiting request moves behind those with the same
        priority; if it was preempted, before them.
        """
        if priority == request.source.priority:
            return
        waits = request.status is RequestStatus.WAITING
        if waits:
            self.waiting.remove(request)
        request.source = msgspec.structs.replace(request.source, priority=priority)
        if waits:
            self.waiting.add(request, first=request.has_run)

    def leave_waiting(self, request: Request) -> None:
        """Removes a request that has started or ended from the waiting queue."""
        self.waiting.remove(request)
        self.num_waiting_tokens -= request.num_tokens

    def swap_out(self, request: Request) -> None:
        """Moves a running request to the swapped ones."""
        self._stop_running(request)
        request.swap_out()
        self.swapped.insert(0, request)

    def restart(self, request: Request) -> None:
        """Moves a running or swapped request to the front of the waiting queue, with nothing
        computed.
        """
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        else:
            self._stop_running(request)
        request.restart()
        if self.fair is not None:
            self.fair.stopped(request)
        self.add(request, first=True)

    def end(self, request: Request) -> None:
        """Marks a request as finished and removes it; a running one is removed by
        `drop_finished`.
        """
        if request.status is RequestStatus.WAITING:
            self.leave_waiting(request)
        elif self.fair is not None:
            self.fair.stopped(request)
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self.num_running_seqs -= request.num_seqs
        request.status = RequestStatus.FINISHED
        del self.by_id[request.request_id]

    def drop_finished(self) -> None:
        """Removes all finished requests from the running ones in a single pass."""
        self.running = [
            request for request in self.running if request.status is RequestStatus.RUNNING
        ]

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.num_running_seqs -= request.num_seqs
