"""Client of a core in the same process: each `receive` computes a step.

Used by `LLM` and by tests. If the core hangs, the caller hangs too, so the core cannot be replaced.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import time

from octavo.engine.clients.client import (
    AbortRequests,
    AddRequests,
    ChangeRequests,
    Command,
    EngineInfo,
    HoldEngine,
    WatchEngine,
)
from octavo.engine.core import EngineCore
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.engine.protocol.requests import EngineRequest, Query, QueryAnswer, RequestChange
from octavo.utils.garbage import RARE_COLLECTION


class InProcessClient:
    """An EngineClient whose core computes in the thread that calls `receive`."""

    trouble = ""

    def __init__(self, core: EngineCore, info: EngineInfo) -> None:
        self.info = info
        self.core = core
        """The core, for inspection while no `receive` runs."""
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._arrival = threading.Event()
        """Set by each command and cleared only by `receive`. If a query in another thread applies
        the command first, `receive` still wakes up.
        """
        self._lock = threading.Lock()
        """Held while the core works, since a query may come from another thread."""
        self._closed = False
        RARE_COLLECTION.begin()

    def add(self, requests: list[EngineRequest]) -> None:
        self._send(AddRequests(requests))

    def abort(self, request_ids: list[str]) -> None:
        self._send(AbortRequests(request_ids))

    def change(self, changes: list[RequestChange]) -> None:
        self._send(ChangeRequests(changes))

    def watch(self, period_s: float) -> None:
        self._send(WatchEngine(period_s))

    def hold(self, *, holds: bool) -> None:
        self._send(HoldEngine(holds))

    def receive(self, timeout_s: float | None = None) -> CoreOutputs | None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._inbox.empty():
            self._await_commands(0)
        while not self._closed:
            pause_s = self.core.pause_s()
            if pause_s is not None and pause_s <= 0:
                break
            left_s = None if end is None else end - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            self._await_commands(min((s for s in (pause_s, left_s) if s is not None), default=None))
        with self._lock:
            return None if self._closed else self.core.step()

    def query(self, query: Query) -> QueryAnswer:
        with self._lock:
            self._apply_commands()
            answer = self.core.query(query)
        self._arrival.set()  # the core may now have outputs
        return answer

    def close(self) -> None:
        """Closes the core, and ends a blocked `receive`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.core.close()
                gc.unfreeze()  # see build_in_process
                RARE_COLLECTION.end()
        self._arrival.set()

    def _send(self, command: Command) -> None:
        self._inbox.put(command)
        self._arrival.set()

    def _await_commands(self, timeout_s: float | None) -> None:
        """Waits for a command, at most `timeout_s` seconds (None: no limit), and applies all
        received commands.
        """
        self._arrival.wait(timeout_s)
        self._arrival.clear()
        with self._lock:
            self._apply_commands()

    def _apply_commands(self) -> None:
        """Applies the received commands in order; the caller holds the lock."""
        with contextlib.suppress(queue.Empty):
            while True:
                apply_command(self.core, self._inbox.get_nowait())


def apply_command(core: EngineCore, command: Command) -> None:
    """Executes a command; queries are not commands of this kind."""
    if isinstance(command, AddRequests):
        for request in command.requests:
            core.add(request)
    elif isinstance(command, AbortRequests):
        for request_id in command.request_ids:
            core.abort(request_id)
    elif isinstance(command, ChangeRequests):
        for change in command.changes:
            core.change(change)
    elif isinstance(command, WatchEngine):
        core.watch(command.period_s)
    elif isinstance(command, HoldEngine):
        core.hold(holds=command.holds)
