"""A core in a process of its own, reached over ZeroMQ: start-up with progress, requests and
outputs, and a clear end when it dies.

Death is seen at once through a pipe that only the child holds open for writing.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from octavo.engine.clients.client import (
    Abort,
    Add,
    Ask,
    Close,
    Command,
    EngineInfo,
    Question,
    ResetPrefixCache,
)
from octavo.engine.clients.core_process import (
    Answered,
    Connected,
    Failed,
    Progress,
    Ready,
    Reply,
    Report,
    Setup,
    Stepped,
)
from octavo.engine.clients.heartbeat import PAGE_BYTES, Slate
from octavo.engine.core import CoreOutputs, TakeEarly
from octavo.engine.kv.pin import Pin
from octavo.engine.requests.request import EngineRequest
from octavo.errors import EngineDead, InvalidRequest, OctavoError, Unavailable, error_named

START = "from octavo.engine.clients.core_process import main; main()"
END_S = 5.0
"""How long a closed core may take to end before it is killed."""
ANSWER_S = 60.0
"""How long a core may take to do what is no step."""
LAST_WORDS_MS = 200
"""How long what a process said before its end may still be on its way."""


class ProcessClient:
    """Starts the process at once; `wait_until_ready` must return before the first request."""

    info: EngineInfo
    trouble = ""

    def __init__(self, build: str, options: dict[str, Any]) -> None:
        """`build` names the function ("module:function") that builds the core in the child."""
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-")
        self._context = zmq.Context()
        self._commands = self._socket(zmq.PUSH)
        self._commands.setsockopt(zmq.RECONNECT_IVL, 10)
        self._commands.connect(
            self._endpoint("commands")
        )  # the side that connects never waits to send, whether or not the child lives
        self._replies = self._socket(zmq.PULL)
        self._replies.bind(self._endpoint("replies"))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._asking = threading.Lock()
        self._num_asked = 0
        self._answers: queue.SimpleQueue[Answered | None] = queue.SimpleQueue()
        """None: there will be no more."""
        self._closing = False
        self.is_ready = False
        life, child_end = os.pipe()
        self._life = os.fdopen(life, "rb", buffering=0)
        try:
            with tempfile.TemporaryFile() as page:
                page.write(bytes(PAGE_BYTES))
                page.flush()
                self.slate = Slate(page.fileno())
                """What the core is doing."""
                self._process = self._start(child_end, page.fileno())
        finally:
            os.close(child_end)
        self._poller = zmq.Poller()
        self._poller.register(self._replies, zmq.POLLIN)
        self._poller.register(self._life.fileno(), zmq.POLLIN)
        self._send(Setup(build, options))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, report: Report) -> EngineInfo:
        """Passes on what the core says of its loading. What keeps it from starting is raised as its
        own kind of error.
        """
        try:
            while True:
                reply = self._next(None)
                if isinstance(reply, Progress):
                    report(reply.text)
                elif isinstance(reply, Ready):
                    return reply.info
                elif reply is None:
                    raise EngineDead("the engine was closed while it started")
        except BaseException:
            self.close()
            raise

    def add(self, requests: list[EngineRequest]) -> None:
        self._send(Add(requests))

    def abort(self, request_ids: list[str]) -> None:
        self._send(Abort(request_ids))

    def receive(
        self, timeout_s: float | None = None, *, take_early: TakeEarly | None = None
    ) -> CoreOutputs | None:
        """EngineDead where the process has ended."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            reply = self._next(None if end is None else max(0.0, end - time.monotonic()))
            if isinstance(reply, Stepped):
                return reply.outputs
            if isinstance(reply, Answered):
                self._answers.put(reply)
            elif reply is None:
                return None

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Needs another thread in `receive`."""
        return bool(self._ask(ResetPrefixCache(reset_connector)))

    def pin_prefix(self, pin: Pin) -> int:
        """Needs another thread in `receive`."""
        return self._ask(pin)

    def kill(self) -> list[CoreOutputs]:
        """Ends a process that hangs, and the client; returns what was still on its way."""
        self._process.kill()
        self._process.wait()
        last = []
        with contextlib.suppress(OctavoError):
            while (step := self.receive(0)) is not None:
                last.append(step)
        self.close()
        return last

    def close(self) -> None:
        """Ends the process; a `receive` that waits returns None, and so does every later one."""
        if self._closing:
            return
        self._closing = True
        self._answers.put(None)
        with self._sending:
            self._commands.send(self._encoder.encode(Close()))
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
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

    def _start(self, child_end: int, page: int) -> subprocess.Popen[bytes]:
        """-P: the child finds modules where this process does, and not first in the current
        directory.
        """
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
        }
        return subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                START,
                self._endpoint("commands"),
                self._endpoint("replies"),
                str(page),
            ],
            stdin=subprocess.PIPE,
            pass_fds=[child_end, page],
            env=environment,
        )

    def _send(self, message: Setup | Command) -> None:
        with self._sending:
            if not self._closing:
                self._commands.send(self._encoder.encode(message))

    def _ask(self, question: Question) -> int:
        with self._asking:
            self._num_asked += 1
            self._send(Ask(self._num_asked, question))
            answered = self._await_answer(self._num_asked)
        if answered.refusal is not None:
            raise InvalidRequest(answered.refusal, hint=answered.hint)
        return answered.value

    def _await_answer(self, number: int) -> Answered:
        """Answers to what was asked before, and given up, are passed over."""
        end = time.monotonic() + ANSWER_S
        try:
            while (
                answered := self._answers.get(timeout=max(0.0, end - time.monotonic()))
            ) is not None:
                if answered.number == number:
                    return answered
        except queue.Empty:
            raise Unavailable(f"the engine has not answered for {ANSWER_S:g} s") from None
        self._answers.put(None)
        raise Unavailable("the engine ended before it answered")

    def _next(self, timeout_s: float | None) -> Reply | None:
        """The next reply; None when the time is up or the client is closed."""
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
            self._answers.put(None)
            raise EngineDead(
                f"the engine process has ended ({_describe_exit(self._process.wait())})"
            )
        return None

    def _note(self, reply: Reply) -> None:
        if isinstance(reply, Failed):
            raise _error_of(reply)
        if isinstance(reply, Connected):
            self._folder.cleanup()  # so that nothing is left of a process that is killed
        if isinstance(reply, Ready):
            self.info, self.is_ready = reply.info, True


def _error_of(failed: Failed) -> OctavoError:
    known = error_named(failed.kind, failed.message, failed.hint)
    return known or EngineDead(f"the engine process has failed: {failed.kind}: {failed.message}")


def _describe_exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
