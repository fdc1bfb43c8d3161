"""Main module of the core's process: builds a core, reports its loading, then runs steps and
commands.

Started by `process.py` with two ZeroMQ endpoints and the heartbeat page. Blocks on its socket while
there is no work, and exits when the frontend's process exits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec
import zmq

from octavo.api.errors import InvalidRequest, OctavoError
from octavo.engine.clients.client import CloseCore, Command, EngineInfo, RunQuery
from octavo.engine.clients.heartbeat import (
    HEARTBEAT_INTERVAL_S,
    HeartbeatPage,
    HeartbeatThread,
    MonitoredExecutor,
)
from octavo.engine.clients.in_process import apply_command
from octavo.engine.clients.messages import (
    CalledToStep,
    Connected,
    CoreReady,
    CoreSetup,
    ExecutorLost,
    LoadProgress,
    QueryResult,
    Reply,
    Stepped,
)
from octavo.engine.core import EngineCore
from octavo.engine.protocol.ports import Losable, SharedStepExecutor
from octavo.utils.child_process import ChildFailed, bind_to_parent
from octavo.utils.garbage import RARE_COLLECTION

BuildCore: TypeAlias = Callable[..., tuple[EngineCore, EngineInfo]]
"""Builds an engine core from options by name, a Report and, if the engine shares its experts with
others, its rank among them.
"""

OWN_COMMANDS = "inproc://own-commands"

SWITCH_INTERVAL_S = 0.0005
"""Maximum time for which a background thread (one that reads adapters or blocks, or compiles
grammars) may hold the interpreter lock while the next step waits, in seconds. Python's default of 5
ms is longer than many steps.
"""

logger = logging.getLogger(__name__)


def main() -> None:
    """Runs the process; its arguments are COMMANDS REPLIES HEARTBEAT.

    The first two are ZeroMQ endpoints, the third the file descriptor of the heartbeat page.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
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
            logger.exception("the engine process is exiting")
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
        self._sharer: SharedStepExecutor | None = None
        """The executor, if it computes steps together with other engines."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command | ExecutorLost | CalledToStep)

    def send(self, reply: Reply) -> None:
        self._replies.send(self._encoder.encode(reply))

    def run(self) -> None:
        """Builds the core and runs it until the frontend closes it."""
        RARE_COLLECTION.begin()
        setup = msgspec.msgpack.decode(self._commands.recv(), type=CoreSetup)
        self.send(Connected())
        module, _, function = setup.build.partition(":")
        build: BuildCore = getattr(importlib.import_module(module), function)
        endpoint_numbers = [setup.endpoint_numbers] if setup.endpoint_numbers else []
        core, info = build(
            setup.options, lambda text: self.send(LoadProgress(text)), *endpoint_numbers
        )
        if isinstance(core.executor, Losable):
            core.executor.when_lost(self._note_loss)
        if isinstance(core.executor, SharedStepExecutor):
            self._sharer = core.executor
            self._sharer.when_called(self._note_call)
        core.executor = MonitoredExecutor(core.executor, self._page)
        heartbeat = HeartbeatThread(core.executor, self._page)
        gc.freeze()  # a full collection would visit the model between two steps (0.2 s)
        self.send(CoreReady(info))
        try:
            while self._take_commands(core, heartbeat):
                if core.has_work:
                    self.send(Stepped(core.step()))
                elif self._must_join_step:
                    self._run_dummy_step(core)
        finally:
            heartbeat.close()
            core.close()
            gc.unfreeze()  # so that the interpreter frees the model when it exits

    def _take_commands(self, core: EngineCore, heartbeat: HeartbeatThread) -> bool:
        """Applies all received commands; blocks until there is one if there is no work.

        Returns False if the process should exit.
        """
        while not (core.has_work or self._must_join_step) or self._commands.poll(
            self._pause_ms(core)
        ):
            if not core.has_work:
                heartbeat.rest()
            command = self._decoder.decode(self._commands.recv())
            heartbeat.wake()
            if isinstance(command, CloseCore):
                return False
            if isinstance(command, ExecutorLost):
                raise command.error.error("the executor")
            if isinstance(command, CalledToStep):
                continue
            if isinstance(command, RunQuery):
                self.send(_make_result(core, command))
            else:
                apply_command(core, command)
        return True

    def _pause_ms(self, core: EngineCore) -> int:
        """Returns the milliseconds for which the next step may wait for a command."""
        pause_s = 0.0 if self._must_join_step else core.pause_s()
        return math.ceil(1000 * min(pause_s or 0.0, HEARTBEAT_INTERVAL_S))

    @property
    def _must_join_step(self) -> bool:
        """Whether another engine has begun a step that this one must also compute."""
        return self._sharer is not None and self._sharer.is_behind

    def _run_dummy_step(self, core: EngineCore) -> None:
        """Computes a dummy step if the core has no work."""
        outputs = core.step()
        if outputs.outputs or outputs.block_events:
            self.send(Stepped(outputs))

    def _note_loss(self, error: OctavoError) -> None:
        self._wake_loop(ExecutorLost(ChildFailed.of(error)))

    def _note_call(self) -> None:
        self._wake_loop(CalledToStep())

    def _wake_loop(self, message: ExecutorLost | CalledToStep) -> None:
        """Wakes the main loop if it is waiting for commands; called by another thread."""
        with self._commands.context.socket(zmq.PUSH) as own:
            own.connect(OWN_COMMANDS)
            own.send(msgspec.msgpack.encode(message))


def _make_result(core: EngineCore, command: RunQuery) -> QueryResult:
    try:
        return QueryResult(command.number, core.query(command.query))
    except InvalidRequest as error:
        return QueryResult(command.number, error=error.message, hint=error.hint)


def _bind(commands: zmq.Socket, endpoint: str) -> bool:
    """Binds the socket; returns False if the frontend has removed the endpoint's folder."""
    try:
        commands.bind(endpoint)
    except zmq.ZMQError:
        if _get_file(endpoint).parent.exists():
            raise
        return False
    return True


def _get_file(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))


def _remove_files(endpoints: list[str]) -> None:
    """Removes the endpoints' folder. A frontend leaves it behind if it is killed before
    Connected.
    """
    with contextlib.suppress(OSError):
        for endpoint in endpoints:
            _get_file(endpoint).unlink(missing_ok=True)
        _get_file(endpoints[0]).parent.rmdir()
