"""Several cores behind one frontend; a routing policy chooses the core of each request.

A core that dies is replaced by its own client. Requests that did not cause the failure continue in
another core: sampling depends only on the request, so its tokens are the same in every core.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from octavo.api.errors import (
    EngineDead,
    InvalidRequest,
    OctavoError,
    PeerEngineDead,
    Unavailable,
)
from octavo.engine.clients.client import EngineInfo, as_number, as_view
from octavo.engine.clients.supervised import SupervisedClient
from octavo.engine.protocol.block_hashes import BlockHashing, note_events
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.engine.protocol.requests import (
    FETCHING,
    EngineRequest,
    Pin,
    Query,
    QueryAnswer,
    RequestChange,
    ResetPrefixCache,
    ViewEngine,
)
from octavo.engine.protocol.stats import EngineStats, total_stats
from octavo.engine.protocol.view import EngineView
from octavo.engine.routing.job import RoutingJob
from octavo.engine.routing.router import Router
from octavo.utils.progress import Report

TROUBLE_INTERVAL_S = 0.25
"""Interval at which requests of a core that is being replaced look for another core, in seconds."""
SESSION_TOKENS = 64
"""Number of first prompt tokens that distinguish sessions of one tenant."""


class FleetClient:
    """An EngineClient over several supervised cores of one model.

    `wait_until_ready` must return before the first request.
    """

    info: EngineInfo

    def __init__(
        self, clients: Sequence[SupervisedClient], router: Router, block_size: int
    ) -> None:
        self._clients = list(clients)
        self._router = router
        self._block_size = block_size
        self._lock = threading.Lock()
        """Guards the router's books, the owners and the stats."""
        self._owners: dict[str, int] = {}
        """Index of the core that computes each request, by request id."""
        self._stats = [EngineStats() for _ in self._clients]
        self._view = FleetView(len(self._clients))
        self._outputs: queue.SimpleQueue[CoreOutputs | OctavoError | None] = queue.SimpleQueue()
        """Steps of all cores; None once the client is closed."""
        self._closing = False

    @property
    def trouble(self) -> str:
        """Reason why no core computes; "" if at least one computes."""
        troubles = [client.trouble for client in self._clients]
        return troubles[0] if all(troubles) else ""

    @property
    def pids(self) -> list[int]:
        """Process ids of the cores."""
        return [client.pid for client in self._clients]

    def wait_until_ready(self, report: Report) -> EngineInfo:
        """Forwards the cores' loading progress, and returns when all are ready."""
        infos = self._infos(report)
        smallest = min(infos, key=lambda info: info.kv_capacity_tokens)
        self.info = msgspec.structs.replace(
            smallest,
            description=f"{len(infos)} engines, each: {smallest.description}",
            kv_bytes=sum(info.kv_bytes for info in infos),
        )
        for target, info in zip(self._router.targets, infos, strict=True):
            target.cached.bound(info.kv_capacity_tokens // self._block_size)
        for index in range(len(self._clients)):
            threading.Thread(
                target=self._read, args=(index,), name=f"octavo-engine-{index}", daemon=True
            ).start()
        return self.info

    def _infos(self, report: Report) -> list[EngineInfo]:
        """Returns the EngineInfo of each core once it is ready. If a core ended only because
        another one did, raises the other core's error.
        """
        infos: list[EngineInfo] = []
        by_peer: PeerEngineDead | None = None
        for index, client in enumerate(self._clients):
            try:
                infos.append(client.wait_until_ready(_add_prefix(report, index)))
            except PeerEngineDead as error:
                by_peer = error
        if by_peer is not None:
            raise by_peer
        return infos

    # -- requests ----------------------------------------------------------------------------------

    def add(self, requests: list[EngineRequest]) -> None:
        """Sends all requests to one core if they share their prompt's blocks."""
        if not requests:
            return
        job = self._job(requests[0])
        with self._lock:
            self._place(requests, job, self._index_for(requests[0], job))

    def abort(self, request_ids: list[str]) -> None:
        with self._lock:
            for index, names in self._by_owner(request_ids).items():
                self._clients[index].abort(names)

    def change(self, changes: list[RequestChange]) -> None:
        of_id = {change.request_id: change for change in changes}
        with self._lock:
            for index, names in self._by_owner(list(of_id)).items():
                self._clients[index].change([of_id[name] for name in names])

    def receive(self, timeout_s: float | None = None) -> CoreOutputs | None:
        try:
            step = self._outputs.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if step is None:
            self._outputs.put(None)  # so that later calls return None too
        elif isinstance(step, OctavoError):
            raise step
        return step

    # -- all cores ---------------------------------------------------------------------------------

    def watch(self, period_s: float) -> None:
        for client in self._clients:
            client.watch(period_s)

    def hold(self, *, holds: bool) -> None:
        for client in self._clients:
            client.hold(holds=holds)

    def stop(self) -> None:
        """Ends all cores, which `restart` starts again."""
        for client in self._clients:
            client.stop()

    def restart(self, changes: Mapping[str, Any]) -> None:
        """Replaces all cores at once, by ones with other values of the options in `changes`."""
        for client in self._clients:
            client.restart(changes)

    @property
    def num_failed_starts(self) -> int:
        return max(client.num_failed_starts for client in self._clients)

    @property
    def is_restarting(self) -> bool:
        return any(client.is_restarting for client in self._clients)

    def query(self, query: Query) -> QueryAnswer:
        if isinstance(query, ViewEngine):
            return self._joined_view(query)
        if isinstance(query, Pin):
            return self._most_pinned(query)
        if isinstance(query, ResetPrefixCache):
            return self._reset_all(query)
        replies = [as_number(client.query(query)) for client in self._clients]
        return FETCHING if FETCHING in replies else max(replies)

    def _joined_view(self, query: ViewEngine) -> EngineView:
        views = {}
        for index, client in enumerate(self._clients):
            if not client.trouble:
                views[index] = as_view(client.query(query))
        if not views:
            raise Unavailable(self.trouble or "the engines are restarting")
        with self._lock:
            return self._view.joined(views)

    def _reset_all(self, query: ResetPrefixCache) -> int:
        with self._lock:
            if self._owners:
                return 0
        done = [client.query(query) for client in self._clients]
        with self._lock:
            for target in self._router.targets:
                target.cached.clear()
        return int(all(done))

    def _most_pinned(self, pin: Pin) -> int:
        """Pins the prompt in every core that has cached it; returns the largest number of tokens
        that a core pinned.
        """
        pinned, errors = [], []
        for client in self._clients:
            try:
                pinned.append(as_number(client.query(pin)))
            except InvalidRequest as error:
                errors.append(error)
        if not pinned:
            raise errors[0]
        return max(pinned)

    def close(self) -> None:
        self._closing = True
        for client in self._clients:
            client.stop_replacing()  # the others may depend on a core that has ended
        for client in self._clients:
            client.close()
        self._outputs.put(None)

    # -- inside ------------------------------------------------------------------------------------

    def _job(self, request: EngineRequest) -> RoutingJob:
        tokens = request.prompt_token_ids
        names: list[bytes] = []
        if self._router.needs_hashes and not request.media:  # ids do not identify media
            adapter = b"" if request.adapter is None else request.adapter.digest
            first = self.info.original.first_position(len(tokens))
            hashing = BlockHashing(request.cache_salt, adapter, first_position=first)
            names = hashing.digests(tokens, self._block_size)
        start = f"{request.tenant}\0{request.cache_salt}\0{tokens[:SESSION_TOKENS]}"
        session = blake2b(start.encode(), digest_size=16).digest()
        return RoutingJob(len(tokens), names, self._block_size, session)

    def _index_for(self, request: EngineRequest, job: RoutingJob) -> int:
        """Returns the core for a request: a fork goes to the core that has its parent's blocks."""
        parent = self._owners.get(request.fork_of or "")
        if parent is not None and not self._clients[parent].trouble:
            return parent
        return self._router.choose(
            job, self._get_running() or range(len(self._clients)), time.monotonic()
        )

    def _get_running(self) -> list[int]:
        """Returns the cores that are running."""
        return [index for index, client in enumerate(self._clients) if not client.trouble]

    def _place(self, requests: list[EngineRequest], job: RoutingJob, index: int) -> None:
        """Sends the requests that share one prompt to a core; the caller holds the lock."""
        self._clients[index].add(requests)
        now = time.monotonic()
        for request in requests:
            self._owners[request.request_id] = index
            self._router.sent(request.request_id, job, index, now)
            job = RoutingJob(0)  # only the first request computes the prompt

    def _by_owner(self, request_ids: list[str]) -> dict[int, list[str]]:
        by_owner: dict[int, list[str]] = {}
        for name in request_ids:
            if name in self._owners:
                by_owner.setdefault(self._owners[name], []).append(name)
        return by_owner

    def _read(self, index: int) -> None:
        """Receives a core's outputs until it is closed; runs in a thread."""
        client = self._clients[index]
        while not self._closing:
            try:
                step = client.receive(TROUBLE_INTERVAL_S if client.trouble else None)
            except OctavoError as error:
                self._outputs.put(EngineDead(error.message))
                return
            if step is not None:
                self._outputs.put(self._process_outputs(index, step))
            if client.trouble:
                self._move_requests(index)

    def _process_outputs(self, index: int, step: CoreOutputs) -> CoreOutputs:
        """Updates the routing state from a core's outputs; returns them with the fleet's totals."""
        now = time.monotonic()
        with self._lock:
            for output in step.outputs:
                self._router.record_tokens(output.request_id, len(output.token_ids), now)
                if output.finish_reason is not None:
                    self._owners.pop(output.request_id, None)
                    self._router.ended(output.request_id)
            self._stats[index] = step.stats
            view = None if step.view is None else self._view.joined({index: step.view})
            note_events(self._router.targets[index].cached, step.block_events)
            stats = total_stats(self._stats)
            return msgspec.structs.replace(step, stats=stats, view=view, engine=index)

    def _move_requests(self, index: int) -> None:
        """Moves the requests of a core that is being replaced to other cores."""
        with self._lock:
            self._router.targets[index].cached.clear()
            well = self._get_running()  # if all are down, its requests wait for its replacement
            requests = self._clients[index].release_unfinished() if well else []
            for request in requests:
                self._router.ended(request.request_id)
                job = self._job(request)
                self._place([request], job, self._router.choose(job, well, time.monotonic()))


def _add_prefix(report: Report, index: int) -> Callable[[str], None]:
    return lambda text: report(f"engine {index}: {text}")


class FleetView:
    """Merges the views of all cores: their requests, and their block maps in the order of the
    cores.
    """

    def __init__(self, num_engines: int) -> None:
        self._newest: list[EngineView | None] = [None] * num_engines

    def joined(self, newer: Mapping[int, EngineView]) -> EngineView:
        """Adds one or more newer views and merges all of them; steps are taken from the newer views
        only.
        """
        for index, view in newer.items():
            self._newest[index] = view
        views = [view for view in self._newest if view is not None]
        latest = max(views, key=lambda view: view.now)
        return msgspec.structs.replace(
            latest,
            num_requests=sum(view.num_requests for view in views),
            requests=[request for view in views for request in view.requests],
            waits_for=next((view.waits_for for view in views if view.waits_for), ""),
            blocks=[blocks for view in views for blocks in view.blocks],
            steps=[step for view in newer.values() for step in view.steps],
        )
