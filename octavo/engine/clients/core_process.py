"""The core's own process: builds a core, tells how far it is, then turns commands into steps until
it is told to end.

Started by `process_client.py` with two ZeroMQ endpoints. Blocks on its socket while there is no
work; ends by itself when the front's process does (its standard input closes). Everything on the
wire is msgpack.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from octavo.engine.clients.client import Ask, Close, Command, EngineInfo, answer, apply_command
from octavo.engine.clients.heartbeat import PULSE_S, Pulse, Slate, Watched
from octavo.engine.core import CoreOutputs, EngineCore
from octavo.errors import EngineDead, InvalidRequest, OctavoError
from octavo.ports import Losable

Report: TypeAlias = Callable[[str], None]
BuildCore: TypeAlias = Callable[[dict[str, Any], Report], tuple[EngineCore, EngineInfo]]
"""Builds the engine of flat options; tells in words what it is doing."""

OWN_COMMANDS = "inproc://own-commands"

logger = logging.getLogger(__name__)


class Setup(msgspec.Struct):
    """The first message to the process."""

    build: str
    """module:function of a BuildCore"""
    options: dict[str, Any]


class Connected(msgspec.Struct, tag=True):
    """The first reply: both ways are open, and the endpoints' files are needed no more."""


class Progress(msgspec.Struct, tag=True):
    text: str


class Ready(msgspec.Struct, tag=True):
    info: EngineInfo


class Failed(msgspec.Struct, tag=True):
    """The process is about to end."""

    kind: str
    """Name of the class in octavo.errors, or of any other exception."""
    message: str
    hint: str | None = None


class Stepped(msgspec.Struct, tag=True):
    outputs: CoreOutputs


class Answered(msgspec.Struct, tag=True):
    number: int
    """Of the question."""
    value: int = 0
    refusal: str | None = None
    """In place of a value: why it is the asker's fault, and a hint."""
    hint: str | None = None


class Lost(msgspec.Struct, tag=True):
    """To itself, from another of its threads: the executor can compute nothing any more."""

    error: str


Reply = Connected | Progress | Ready | Failed | Stepped | Answered


def main() -> None:
    """`python -c "from octavo.engine.clients.core_process import main; main()" COMMANDS REPLIES
    SLATE`, the last a file descriptor.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the front decides
    context = zmq.Context()
    commands, replies = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    if not _bind(commands, sys.argv[1]):
        return
    threading.Thread(target=_end_with_parent, args=(sys.argv[1:3],), daemon=True).start()
    commands.bind(OWN_COMMANDS)
    replies.connect(sys.argv[2])
    loop = CoreLoop(commands, replies, Slate(int(sys.argv[3])))
    try:
        loop.run()
    except Exception as error:
        if not isinstance(error, OctavoError):
            logger.exception("the engine process ends")
        loop.send(
            Failed(
                type(error).__name__,
                getattr(error, "message", str(error)),
                getattr(error, "hint", None),
            )
        )
        sys.exit(1)
    finally:
        commands.close(linger=0)
        replies.close(linger=2000)
        context.term()


class CoreLoop:
    """Commands in, steps, replies out."""

    def __init__(self, commands: zmq.Socket, replies: zmq.Socket, slate: Slate) -> None:
        self._commands = commands
        self._replies = replies
        self._slate = slate
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command | Lost)

    def send(self, reply: Reply) -> None:
        self._replies.send(self._encoder.encode(reply))

    def run(self) -> None:
        setup = msgspec.msgpack.decode(self._commands.recv(), type=Setup)
        self.send(Connected())
        module, _, function = setup.build.partition(":")
        build: BuildCore = getattr(importlib.import_module(module), function)
        core, info = build(setup.options, lambda text: self.send(Progress(text)))
        if isinstance(core.executor, Losable):
            core.executor.when_lost(self._tell_itself)
        core.executor = Watched(core.executor, self._slate)
        pulse = Pulse(core.executor, self._slate)
        self.send(Ready(info))
        try:
            while self._take_commands(core, pulse):
                if core.has_work:
                    self.send(Stepped(core.step(self._send_early)))
        finally:
            pulse.close()
            core.close()

    def _send_early(self, outputs: CoreOutputs) -> bool:
        """Unless a command has come, which goes before further steps."""
        if int(self._commands.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return False
        self.send(Stepped(outputs))
        return True

    def _take_commands(self, core: EngineCore, pulse: Pulse) -> bool:
        """All that have come, waiting for one while there is no work. False: it is time to end."""
        while not core.has_work or self._commands.poll(
            math.ceil(1000 * min(core.pause_s(), PULSE_S))
        ):
            if not core.has_work:
                pulse.rest()
            command = self._decoder.decode(self._commands.recv())
            pulse.wake()
            if isinstance(command, Close):
                return False
            if isinstance(command, Lost):
                raise EngineDead(command.error)
            if isinstance(command, Ask):
                self.send(_answer(core, command))
            else:
                apply_command(core, command)
        return True

    def _tell_itself(self, error: OctavoError) -> None:
        """Wakes a loop that waits for commands; called by another thread."""
        with self._commands.context.socket(zmq.PUSH) as own:
            own.connect(OWN_COMMANDS)
            own.send(self._encoder.encode(Lost(error.message)))


def _answer(core: EngineCore, asked: Ask) -> Answered:
    try:
        return Answered(asked.number, answer(core, asked.question))
    except InvalidRequest as error:
        return Answered(asked.number, refusal=error.message, hint=error.hint)


def _bind(commands: zmq.Socket, endpoint: str) -> bool:
    """False where the front has ended before this process got so far, and has taken the endpoint's
    folder along.
    """
    try:
        commands.bind(endpoint)
    except zmq.ZMQError:
        if _file_of(endpoint).parent.exists():
            raise
        return False
    return True


def _file_of(endpoint: str) -> Path:
    return Path(endpoint.removeprefix("ipc://"))


def _end_with_parent(endpoints: list[str]) -> None:
    """Standard input is a pipe that nobody writes to; it ends when the front's process does.

    A front that was killed before both were connected has left the endpoints' files and their
    folder.
    """
    while os.read(0, 1):
        pass
    with contextlib.suppress(OSError):
        for endpoint in endpoints:
            _file_of(endpoint).unlink(missing_ok=True)
        _file_of(endpoints[0]).parent.rmdir()
    os._exit(0)
