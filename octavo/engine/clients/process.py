"""Client of a core in a separate process: starts it, sends commands and receives outputs over
ZeroMQ, and detects its death.

Death is detected immediately through a pipe whose write end only the child holds. `supervised.py`
handles the death.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.api.errors import EngineDead, InvalidRequest, OctavoError, Unavailable
from octavo.engine.clients.client import (
    AbortRequests,
    ChangeRequests,
    CloseCore,
    Command,
    EngineInfo,
    HoldEngine,
    RunQuery,
    WatchEngine,
)
from octavo.engine.clients.heartbeat import PAGE_BYTES, HeartbeatPage
from octavo.engine.clients.messages import (
    Connected,
    CoreReady,
    CoreSetup,
    LoadProgress,
    QueryResult,
    Reply,
    Stepped,
    encode_requests,
)
from octavo.engine.protocol.outputs import CoreOutputs
from octavo.engine.protocol.requests import EngineRequest, Query, QueryAnswer, RequestChange
from octavo.utils.child_process import ChildFailed, describe_exit, end_process, start_bound_child
from octavo.utils.progress import Report

MAIN = "octavo.engine.clients.core_process:main"
END_S = 5.0
"""Time that a closed core has to exit before it is killed, in seconds; a core that is still loading
is killed at once.
"""
ANSWER_S = 60.0
"""Timeout of a query, in seconds."""
LAST_WORDS_MS = 200
"""Time to wait for the last messages of a dead process, in milliseconds."""


class ProcessClient:
    """An EngineClient that starts a core process in its constructor.

    Call `wait_until_ready` before the first request. After the process has ended, `receive` raises
    EngineDead.
    """

    info: EngineInfo
    trouble = ""

    def __init__(
        self,
        build: str,
        options: dict[str, Any],
        *,
        endpoint_numbers: Sequence[int] = (),
        inherited: Sequence[int] = (),
    ) -> None:
        """`build` names the function ("module:function") that builds the core in the child process.
        The child inherits the file descriptors `inherited`; a non-empty `endpoint_numbers` is
        passed to `build`.
        """
        self._inherited = inherited
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-")
        self._context = zmq.Context()
        self._commands = self._socket(zmq.PUSH)
        self._commands.setsockopt(zmq.RECONNECT_IVL, 10)
        # connect() does not block in send, whether or not the child lives.
        self._commands.connect(self._endpoint("commands"))
        self._replies = self._socket(zmq.PULL)
        self._replies.bind(self._endpoint("replies"))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._querying = threading.Lock()
        self._num_queries = 0
        self._results: queue.SimpleQueue[QueryResult | None] = queue.SimpleQueue()
        """Replies to queries in order of arrival; None after the last one."""
        self._closing = False
        self.is_ready = False
        life, child_end = os.pipe()
        self._life = os.fdopen(life, "rb", buffering=0)
        try:
            with tempfile.TemporaryFile() as file:
                file.write(bytes(PAGE_BYTES))
                file.flush()
                self.heartbeat = HeartbeatPage(file.fileno())
                self._process = self._start(child_end, file.fileno())
        finally:
            os.close(child_end)
        self._poller = zmq.Poller()
        self._poller.register(self._replies, zmq.POLLIN)
        self._poller.register(self._life.fileno(), zmq.POLLIN)
        self._send(msgspec.msgpack.encode(CoreSetup(build, options, list(endpoint_numbers))))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, report: Report) -> EngineInfo:
        """Forwards the core's loading progress, and returns when it is ready.

        An error that prevents the core from starting is raised with its own type.
        """
        try:
            while True:
                reply = self._next(None)
                if isinstance(reply, LoadProgress):
                    report(reply.text)
                elif isinstance(reply, CoreReady):
                    return reply.info
                elif reply is None:
                    raise EngineDead("the engine was closed during startup")
        except BaseException:
            self.close()
            raise

    def add(self, requests: list[EngineRequest]) -> None:
        self.add_encoded(encode_requests(requests))

    def add_encoded(self, requests: bytes) -> None:
        """Like `add`, with the result of `encode_requests`."""
        self._send(requests)

    def abort(self, request_ids: list[str]) -> None:
        self._command(AbortRequests(request_ids))

    def change(self, changes: list[RequestChange]) -> None:
        self._command(ChangeRequests(changes))

    def watch(self, period_s: float) -> None:
        self._command(WatchEngine(period_s))

    def hold(self, *, holds: bool) -> None:
        self._command(HoldEngine(holds))

    def receive(self, timeout_s: float | None = None) -> CoreOutputs | None:
        """Returns the next outputs of the core; raises EngineDead if the process has ended. Returns
        None after a timeout or if the client is closed.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            reply = self._next(None if end is None else max(0.0, end - time.monotonic()))
            if isinstance(reply, Stepped):
                return reply.outputs
            if isinstance(reply, QueryResult):
                self._results.put(reply)
            elif reply is None:
                return None

    def query(self, query: Query) -> QueryAnswer:
        """Implements `EngineClient.query`. Another thread must be in `receive`, which reads the
        reply.
        """
        with self._querying:
            self._num_queries += 1
            self._command(RunQuery(self._num_queries, query))
            result = self._await_result(self._num_queries)
        if result.error is not None:
            raise InvalidRequest(result.error, hint=result.hint)
        return result.value

    def end(self) -> None:
        """Kills the process; `receive` then raises EngineDead."""
        self._process.kill()

    def kill(self) -> list[CoreOutputs]:
        """Kills a process that hangs or has died, and closes the client; returns its last
        outputs.
        """
        self._process.kill()
        self._process.wait()
        last = []
        with contextlib.suppress(OctavoError):
            while (step := self.receive(0)) is not None:
                last.append(step)
        self.close()
        return last

    def close(self) -> None:
        """Ends the process; a blocked `receive` returns None, as do all later calls."""
        if self._closing:
            return
        self._closing = True
        self._results.put(None)
        with self._sending:
            self._commands.send(self._encoder.encode(CloseCore()))
        end_process(self._process, END_S if self.is_ready else 0.0)
        with self._sending, self._receiving:
            self._context.destroy(linger=0)
            self._life.close()
        self._folder.cleanup()

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket

    def _endpoint(self, name: str) -> str:
        return f"ipc://{Path(self._folder.name) / name}"

    def _start(self, life: int, page: int) -> subprocess.Popen[bytes]:
        arguments = [self._endpoint("commands"), self._endpoint("replies"), str(page)]
        return start_bound_child(MAIN, arguments, pass_fds=[life, page, *self._inherited])

    def _command(self, command: Command) -> None:
        self._send(self._encoder.encode(command))

    def _send(self, message: bytes) -> None:
        with self._sending:
            if not self._closing:
                self._commands.send(message)

    def _await_result(self, number: int) -> QueryResult:
        """Returns the reply to query `number`; skips replies to queries that have timed out."""
        end = time.monotonic() + ANSWER_S
        try:
            while (
                result := self._results.get(timeout=max(0.0, end - time.monotonic()))
            ) is not None:
                if result.number == number:
                    return result
        except queue.Empty:
            raise Unavailable(f"the engine has not responded for {ANSWER_S:g} s") from None
        self._results.put(None)
        raise Unavailable("the engine exited before it responded")

    def _next(self, timeout_s: float | None) -> Reply | None:
        """Returns the next message; None after a timeout or if the client is closed."""
        with self._receiving:
            if self._closing:
                return None
            ready = dict(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
            ended = self._life.fileno() in ready
            if self._replies in ready or (ended and self._replies.poll(LAST_WORDS_MS)):
                reply: Reply = self._decoder.decode(self._replies.recv())
                self._note(reply)
                return reply
        if ended and not self._closing:
            self._results.put(None)
            how = describe_exit(self._process.wait())
            raise EngineDead(
                f"the engine process has exited ({how})", hint="the log above shows why"
            )
        return None

    def _note(self, reply: Reply) -> None:
        if isinstance(reply, ChildFailed):
            raise reply.error("the engine process")
        if isinstance(reply, Connected):
            self._folder.cleanup()  # both sockets are open: delete their files
        if isinstance(reply, CoreReady):
            self.info, self.is_ready = reply.info, True
