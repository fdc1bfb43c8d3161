"""The process of a rank other than the first: loads its part of the model, then carries out every
plan that the first rank sends.

Started by `other_ranks.py` with a pipe to the first rank; ends when it is told to, when that pipe
or its standard input closes, or when anything fails, for then it is no longer in step with the
others.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from octavo.errors import OctavoError
from octavo.ports import Executor
from octavo.worker.ranks.messages import (
    Allocate,
    Close,
    Execute,
    Failed,
    Fits,
    FromRank,
    Loaded,
    Measure,
    Ready,
    Setup,
    Started,
    ToRank,
)

PR_SET_PDEATHSIG = 1
"""Of Linux' prctl(2): a process that is stopped or stuck ends with its parent, too."""

logger = logging.getLogger(__name__)

Message = TypeVar("Message")


class LoadedRank(Protocol):
    """A rank's part of a model, its weights in place."""

    def num_blocks(self) -> Sequence[int]:
        """That fit, per cache group."""
        ...

    def worker(self, num_blocks: Sequence[int], num_host_blocks: Sequence[int]) -> Executor: ...


BuildRank: TypeAlias = Callable[[Setup, Callable[[], None]], LoadedRank]
"""Calls the second argument once all that may be missing has been found, then meets the others and
loads.
"""


def main() -> None:
    """`python -c "from octavo.worker.ranks.process import main; main()" FD DIES`: its end of the
    pipe; 1 where it is to be killed with its parent, else 0."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the first rank decides
    if sys.argv[2] == "1" and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loop = RankLoop(Connection(int(sys.argv[1])))
    try:
        loop.run()
    except (EOFError, ConnectionError):
        pass  # the first rank has gone
    except Exception as error:
        loop.fail(error)


class RankLoop:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)

    def run(self) -> None:
        setup = self._expect(Setup)
        module, _, function = setup.build.partition(":")
        build: BuildRank = getattr(importlib.import_module(module), function)
        loaded = build(setup, lambda: self._send(Started()))
        self._send(Loaded())
        self._expect(Measure)
        self._send(Fits(list(loaded.num_blocks())))
        wanted = self._expect(Allocate)
        worker = loaded.worker(wanted.num_blocks, wanted.num_host_blocks)
        self._send(Ready())
        while isinstance(message := self._receive(), Execute):
            worker.execute(message.plan)
        assert isinstance(message, Close)
        worker.close()

    def fail(self, error: Exception) -> None:
        """Tells the first rank why, and ends at once: other threads may wait for what never
        comes."""
        if not isinstance(error, OctavoError):
            logger.exception("a rank ends", exc_info=error)
        self._send(
            Failed(
                type(error).__name__,
                getattr(error, "message", str(error)),
                getattr(error, "hint", None),
            )
        )
        os._exit(1)

    def _send(self, message: FromRank) -> None:
        self._connection.send_bytes(self._encoder.encode(message))

    def _receive(self) -> ToRank:
        message: ToRank = self._decoder.decode(self._connection.recv_bytes())
        return message

    def _expect(self, kind: type[Message]) -> Message:
        message = self._receive()
        if isinstance(message, Close):
            raise EOFError
        assert isinstance(message, kind)
        return message


def _end_with_parent() -> None:
    """Standard input is a pipe that nobody writes to; it ends when the first rank's process
    does."""
    while os.read(0, 1):
        pass
    os._exit(0)
