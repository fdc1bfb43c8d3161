"""The process of a rank other than the first: loads its part of the model, then executes every plan
that the first rank sends.

Started by `other_ranks.py` with a pipe to the first rank, or by `octavo rank` on another machine.
Ends when asked to, when that pipe or its standard input closes, and on any failure, since it is
then out of step with the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from octavo.api.errors import OctavoError
from octavo.engine.protocol.kv_messages import ConnectorReport
from octavo.utils.child_process import ChildFailed, bind_to_parent
from octavo.worker.ranks.messages import (
    Allocate,
    AppendTokens,
    CloseRank,
    Execute,
    FittingBlocks,
    FromRank,
    Measure,
    RankLoaded,
    RankReady,
    RankReport,
    RankSetup,
    RankStarted,
    ToRank,
)

if TYPE_CHECKING:
    from octavo.worker.loaded_model import LoadedModel

PR_SET_PDEATHSIG = 1
"""Option of Linux prctl(2) that kills a process with its parent, even if it is stopped or stuck."""

logger = logging.getLogger(__name__)

Message = TypeVar("Message")


BuildRank: TypeAlias = "Callable[[RankSetup, Callable[[], None]], LoadedModel]"
"""Joins the other ranks and loads this rank's part of the model.

Calls its second argument once it knows that all required files and devices exist, before joining.
"""


def main() -> None:
    """Runs the process; its arguments are FD DIES_WITH_PARENT.

    FD is the file descriptor of its end of the pipe. DIES_WITH_PARENT is 1 if the kernel is to kill
    the process with the thread that started it, else 0.
    """
    if sys.argv[2] == "1" and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    bind_to_parent()
    loop = RankLoop(Connection(int(sys.argv[1])))
    try:
        loop.run()
    except (EOFError, ConnectionError):
        pass  # the first rank is gone
    except Exception as error:
        loop.fail(error)


def run_joined(connection: Connection) -> bool:
    """Runs a rank on another machine than the first; returns whether it was asked to end."""
    loop = RankLoop(connection)
    try:
        loop.run()
    except (EOFError, ConnectionError):
        return False
    except Exception as error:
        loop.fail(error)
    return True


class RankLoop:
    """The process's main loop over the first rank's messages."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        """Held while a message is sent, since reports come from other threads."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)

    def run(self) -> None:
        """Loads the model, allocates the KV cache and executes plans until asked to end."""
        setup = self._expect(RankSetup)
        module, _, function = setup.build.partition(":")
        build: BuildRank = getattr(importlib.import_module(module), function)
        loaded = build(setup, lambda: self._send(RankStarted()))
        self._send(RankLoaded())
        self._expect(Measure)
        self._send(FittingBlocks(list(loaded.num_blocks())))
        allocate = self._expect(Allocate)
        slots = allocate.slots
        connector = None if slots is None else loaded.connect(slots, self._tell)
        worker = loaded.worker(allocate.num_blocks, allocate.num_host_blocks, connector)
        self._send(RankReady())
        while isinstance(message := self._receive(), Execute | AppendTokens):
            if isinstance(message, AppendTokens):
                loaded.append_tokens(message.sampled)
            else:
                loaded.await_input(message.plan)
                worker.execute(message.plan)
        assert isinstance(message, CloseRank)
        worker.close()

    def fail(self, error: Exception) -> None:
        """Sends the error to the first rank, and ends the process immediately.

        Skips cleanup: other threads may be blocked in a collective forever.
        """
        if not isinstance(error, OctavoError):
            logger.exception("the rank is exiting after an error", exc_info=error)
        self._send(ChildFailed.of(error))
        os._exit(1)

    def _tell(self, report: ConnectorReport) -> None:
        """Sends a report. Ignores a closed connection, since the main loop detects the end of the
        first rank.
        """
        with contextlib.suppress(OSError):
            self._send(RankReport(report))

    def _send(self, message: FromRank) -> None:
        with self._sending:
            self._connection.send_bytes(self._encoder.encode(message))

    def _receive(self) -> ToRank:
        message: ToRank = self._decoder.decode(self._connection.recv_bytes())
        return message

    def _expect(self, kind: type[Message]) -> Message:
        message = self._receive()
        if isinstance(message, CloseRank):
            raise EOFError
        assert isinstance(message, kind)
        return message
