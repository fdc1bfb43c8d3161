"""The unfinished requests by state: waiting, running, or swapped out to host memory.

The one owner of these states and of the counts that follow from them. Decides nothing: in which
order the waiting ones start is the policy's business.
"""

from __future__ import annotations

import msgspec

from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.scheduler.policy import Policy


class RequestQueues:
    """Every unfinished request, each in exactly one state."""

    def __init__(self, policy: Policy) -> None:
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        """Requests whose blocks are in host memory, the last one preempted first."""
        self.waiting = policy
        self.num_running_seqs = 0
        """Rows that the running requests have, or may come to have."""
        self.num_waiting_tokens = 0
        self.by_id: dict[str, Request] = {}

    def __bool__(self) -> bool:
        return bool(self.by_id)

    def find(self, request_id: str) -> Request | None:
        return self.by_id.get(request_id)

    @property
    def first_idle(self) -> Request | None:
        """The request that runs next: the first that is swapped out, else the first that waits."""
        return self.swapped[0] if self.swapped else next(self.waiting.order(), None)

    @property
    def num_batch_seqs(self) -> int:
        """Rows of the running and the swapped requests together."""
        return self.num_running_seqs + sum(request.num_seqs for request in self.swapped)

    # -- from state to state -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Takes in a new request, which waits."""
        self.by_id[request.request_id] = request
        self._wait(request)

    def run(self, request: Request) -> None:
        """Moves a request to the running. One that waited stays in its queue until
        `leave_waiting`.
        """
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.num_running_seqs += request.num_seqs

    def set_priority(self, request: Request, priority: int) -> None:
        """Gives a request another priority; where it waits, it goes behind those that wait with
        that one, one that has run before them.
        """
        if priority == request.source.priority:
            return
        waits = request.status is RequestStatus.WAITING
        if waits:
            self.waiting.leave(request)
        request.source = msgspec.structs.replace(request.source, priority=priority)
        if waits:
            self.waiting.join(request, first=request.has_run)

    def leave_waiting(self, request: Request) -> None:
        """Takes a request that has started or ended out of the waiting."""
        self.waiting.leave(request)
        self.num_waiting_tokens -= request.num_tokens

    def swap_out(self, request: Request) -> None:
        """Moves a running request to the swapped."""
        self._stop_running(request)
        request.swap_out()
        self.swapped.insert(0, request)

    def start_over(self, request: Request) -> None:
        """Moves a running or swapped request to the front of the waiting, with nothing computed."""
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        else:
            self._stop_running(request)
        request.start_over()
        self.waiting.stopped(request)
        self._wait(request, first=True)

    def end(self, request: Request) -> None:
        """Marks a request as finished and forgets it; `drop_finished` takes a running one out."""
        if request.status is RequestStatus.WAITING:
            self.leave_waiting(request)
        else:
            self.waiting.stopped(request)
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self.num_running_seqs -= request.num_seqs
        request.status = RequestStatus.FINISHED
        del self.by_id[request.request_id]

    def drop_finished(self) -> None:
        """Takes finished requests out of the running, all of them in one pass."""
        self.running = [
            request for request in self.running if request.status is RequestStatus.RUNNING
        ]

    def _wait(self, request: Request, *, first: bool = False) -> None:
        self.waiting.join(request, first=first)
        self.num_waiting_tokens += request.num_tokens

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self.num_running_seqs -= request.num_seqs
