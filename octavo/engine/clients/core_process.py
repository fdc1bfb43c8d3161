"""The core's own process: builds a core, reports its loading, then turns commands into steps.

Started by `process.py` with two ZeroMQ endpoints and the heartbeat page. Blocks on its socket while
there is no work; ends by itself when the front's process does.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from octavo.child_process import ChildFailed, bind_to_parent
from octavo.engine.clients.client import (
    CloseCore,
    Command,
    EngineInfo,
    RunQuery,
    apply_command,
    run_query,
)
from octavo.engine.clients.heartbeat import (
    HEARTBEAT_INTERVAL_S,
    HeartbeatPage,
    HeartbeatThread,
    MonitoredExecutor,
)
from octavo.engine.clients.messages import (
    Connected,
    CoreReady,
    CoreSetup,
    ExecutorLost,
    LoadProgress,
    QueryResult,
    Reply,
    Stepped,
)
from octavo.engine.core import CoreOutputs, EngineCore
from octavo.errors import EngineDead, InvalidRequest, OctavoError
from octavo.ports import Losable
from octavo.progress import Report

BuildCore: TypeAlias = Callable[[dict[str, Any], Report], tuple[EngineCore, EngineInfo]]
"""Builds an engine core from flat options."""

OWN_COMMANDS = "inproc://own-commands"

logger = logging.getLogger(__name__)


def main() -> None:
    """Runs the process; its arguments are COMMANDS REPLIES HEARTBEAT.

    The first two are ZeroMQ endpoints, the third the file descriptor of the heartbeat page.
    """
    endpoints = sys.argv[1:3]
    context = zmq.Context()
    commands, replies = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    if not _bind(commands, endpoints[0]):
        return
    bind_to_parent(clean_up=lambda: _remove_files(endpoints))
    commands.bind(OWN_COMMANDS)
    replies.connect(endpoints[1])
    loop = CoreLoop(commands, replies, HeartbeatPage(int(sys.argv[3])))
    try:
        loop.run()
    except Exception as error:
        if not isinstance(error, OctavoError):
            logger.exception("the engine process ends")
        loop.send(ChildFailed.of(error))
        sys.exit(1)
    finally:
        commands.close(linger=0)
        replies.close(linger=2000)
        context.term()


class CoreLoop:
    """The process's main loop: commands in, steps, replies out."""

    def __init__(self, commands: zmq.Socket, replies: zmq.Socket, page: HeartbeatPage) -> None:
        self._commands = commands
        self._replies = replies
        self._page = page
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command | ExecutorLost)

    def send(self, reply: Reply) -> None:
        self._replies.send(self._encoder.encode(reply))

    def run(self) -> None:
        """Builds the core, then serves it until the front closes it; raises what ends it early."""
        setup = msgspec.msgpack.decode(self._commands.recv(), type=CoreSetup)
        self.send(Connected())
        module, _, function = setup.build.partition(":")
        build: BuildCore = getattr(importlib.import_module(module), function)
        core, info = build(setup.options, lambda text: self.send(LoadProgress(text)))
        if isinstance(core.executor, Losable):
            core.executor.when_lost(self._note_loss)
        core.executor = MonitoredExecutor(core.executor, self._page)
        heartbeat = HeartbeatThread(core.executor, self._page)
        self.send(CoreReady(info))
        try:
            while self._take_commands(core, heartbeat):
                if core.has_work:
                    self.send(Stepped(core.step(self._send_early)))
        finally:
            heartbeat.close()
            core.close()

    def _send_early(self, outputs: CoreOutputs) -> bool:
        """Sends outputs before their step's end, unless a command has come, which goes first."""
        if int(self._commands.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return False
        self.send(Stepped(outputs))
        return True

    def _take_commands(self, core: EngineCore, heartbeat: HeartbeatThread) -> bool:
        """Applies all commands that have come, and blocks for one while there is no work.

        Returns False when it is time to end.
        """
        while not core.has_work or self._commands.poll(
            math.ceil(1000 * min(core.pause_s(), HEARTBEAT_INTERVAL_S))
        ):
            if not core.has_work:
                heartbeat.rest()
            command = self._decoder.decode(self._commands.recv())
            heartbeat.wake()
            if isinstance(command, CloseCore):
                return False
            if isinstance(command, ExecutorLost):
                raise EngineDead(command.error)
            if isinstance(command, RunQuery):
                self.send(_result_of(core, command))
            else:
                apply_command(core, command)
        return True

    def _note_loss(self, error: OctavoError) -> None:
        """Wakes a loop that blocks for commands; called by another thread."""
        with self._commands.context.socket(zmq.PUSH) as own:
            own.connect(OWN_COMMANDS)
            own.send(self._encoder.encode(ExecutorLost(error.message)))


def _result_of(core: EngineCore, command: RunQuery) -> QueryResult:
    try:
        return QueryResult(command.number, run_query(core, command.query))
    except InvalidRequest as error:
        return QueryResult(command.number, refusal=error.message, hint=error.hint)


def _bind(commands: zmq.Socket, endpoint: str) -> bool:
    """Binds the socket; returns False if the front has ended and removed the endpoint's folder."""
    try:
        commands.bind(endpoint)
    except zmq.ZMQError:
        if _file_of(endpoint).parent.exists():
            raise
        return False
    return True


def _file_of(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))


def _remove_files(endpoints: list[str]) -> None:
    """Removes the endpoints' folder, which a front leaves if it is killed before Connected."""
    with contextlib.suppress(OSError):
        for endpoint in endpoints:
            _file_of(endpoint).unlink(missing_ok=True)
        _file_of(endpoints[0]).parent.rmdir()
