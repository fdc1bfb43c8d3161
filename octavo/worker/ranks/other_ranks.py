"""Management of the other ranks by the first one: starts them, sends messages to all, and detects
when they end.

If any rank ends, the engine ends, since the rank's weights and KV are lost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from octavo.api.errors import EngineDead, OctavoError
from octavo.engine.protocol.kv_messages import ConnectorReport
from octavo.executor.ranks import RankRendezvous
from octavo.utils.child_process import ChildFailed, describe_exit, end_process, start_bound_child
from octavo.worker.ranks.messages import CloseRank, FromRank, RankReport, RankSetup, ToRank

MAIN = "octavo.worker.ranks.process:main"
END_S = 5.0
"""Timeout in seconds for closed ranks to exit before they are killed."""
NOTICE_S = 5.0
"""Timeout in seconds for noticing that a rank is lost after its connections break."""

Message = TypeVar("Message", bound=FromRank)
OnReport = Callable[[int, ConnectorReport], None]
"""Receives a rank's report, in another thread."""
OnLoss = Callable[[OctavoError], None]
"""Receives the reason for a rank's end, in another thread."""


@dataclass(frozen=True, slots=True)
class StartedRank:
    """Another rank that waits for its first message."""

    connection: Connection
    process: subprocess.Popen[bytes] | None
    """Process of the rank; None if it is on another machine."""


StartRank = Callable[[RankSetup, tuple[int, ...]], StartedRank]
"""Starts a rank whose process inherits these file descriptors, or waits until it has joined."""


def start_here(setup: RankSetup, inherited: tuple[int, ...]) -> StartedRank:
    """Starts a rank as a local process that ends when this one ends."""
    connection, theirs = Pipe()
    # The kernel counts the thread that starts a process as its parent, so the child may be
    # killed with that thread only if this is the main thread, which lives as long as the process.
    dies_with_parent = int(threading.current_thread() is threading.main_thread())
    arguments = [str(theirs.fileno()), str(dies_with_parent)]
    process = start_bound_child(MAIN, arguments, pass_fds=[theirs.fileno(), *inherited])
    theirs.close()
    return StartedRank(connection, process)


class RankLink:
    """The connection to one other rank, with a thread that reads its messages."""

    def __init__(self, setup: RankSetup, started: StartedRank, on_loss: OnLoss) -> None:
        self._name = f"rank {setup.rank} of {setup.num_ranks}"
        self._rank = setup.rank
        self._on_loss = on_loss
        self.on_report: OnReport | None = None
        """Must be set before the rank sends reports."""
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._reports: queue.SimpleQueue[FromRank | OctavoError] = queue.SimpleQueue()
        self.is_closing = False
        """Whether the rank was asked to end, so that its end is not an error."""
        self._connection = started.connection
        self.process = started.process
        self._reader = threading.Thread(
            target=self._read, name=f"octavo-rank-{setup.rank}", daemon=True
        )
        self._reader.start()
        self.send(msgspec.msgpack.encode(setup))

    def send(self, message: bytes) -> None:
        """Sends a message. Does nothing if the rank is gone, which `on_loss` reports."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(message)

    def expect(self, kind: type[Message]) -> Message:
        """Returns the rank's next message; raises the reason if it has ended."""
        report = self._reports.get()
        if isinstance(report, OctavoError):
            raise report
        assert isinstance(report, kind)
        return report

    def kill(self) -> None:
        """Kills a local process."""
        if self.process is not None:
            with contextlib.suppress(OSError):  # it has already ended
                self.process.kill()

    def close(self, patience_s: float) -> None:
        """Waits for a rank that was asked to end, and kills it after the timeout. A rank on another
        machine ends when its connection is closed.
        """
        if self.process is not None:
            end_process(self.process, patience_s)
        else:
            self._reader.join(patience_s)
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(self._connection.fileno())) as peer,
            ):
                peer.shutdown(socket.SHUT_RDWR)  # unblocks a pending read
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        lost: OctavoError | None = None
        try:
            while lost is None:
                report = self._decoder.decode(self._connection.recv_bytes())
                if isinstance(report, ChildFailed):
                    lost = report.error(self._name)
                elif isinstance(report, RankReport):
                    assert self.on_report is not None, "it is told of no slots before"
                    self.on_report(self._rank, report.report)
                else:
                    self._reports.put(report)
        except (EOFError, OSError):
            lost = EngineDead(f"{self._name} has ended ({self._describe_end()})")
        if not self.is_closing:
            self._reports.put(lost)
            self._on_loss(lost)

    def _describe_end(self) -> str:
        if self.process is None:
            return "its connection has broken"
        return describe_exit(self.process.wait())


class OtherRanks:
    """Ranks 1 to num_ranks - 1, all started at once."""

    def __init__(
        self,
        build: str,
        options: dict[str, Any],
        num_ranks: int,
        rendezvous: RankRendezvous,
        start: StartRank = start_here,
    ) -> None:
        """`build` is the name of a `process.BuildRank` as "module:function"."""
        self.num_ranks = num_ranks
        self._encoder = msgspec.msgpack.Encoder()
        self._lost: OctavoError | None = None
        self._dead: EngineDead | None = None
        """Error that every step raises after the first failure of any rank."""
        self._is_lost = threading.Event()
        self._on_loss: list[OnLoss] = []
        self._lock = threading.Lock()
        self._ranks: list[RankLink] = []
        try:
            for rank in range(1, num_ranks):
                setup = RankSetup(build, options, rank, num_ranks, rendezvous.get_address(rank))
                started = start(setup, rendezvous.get_inherited(rank))
                self._ranks.append(RankLink(setup, started, self.lose))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks if rank.process is not None]

    @property
    def lost(self) -> OctavoError | None:
        """Error of the first rank that ended unexpectedly; None while all ranks are alive."""
        return self._lost

    def when_lost(self, on_loss: OnLoss) -> None:
        """Registers a callback for a rank that ends unexpectedly; called immediately if one has."""
        with self._lock:
            if self._lost is None:
                self._on_loss.append(on_loss)
                return
        on_loss(self._lost)

    def when_reported(self, on_report: OnReport) -> None:
        """Registers a callback for the ranks' reports."""
        for rank in self._ranks:
            rank.on_report = on_report

    def check(self) -> None:
        """Raises EngineDead after the first failure of any rank."""
        if self._lost is not None:
            self._die(self._lost, "")
        if self._dead is not None:
            raise self._dead

    def ended_by(self, error: Exception, place: str) -> EngineDead:
        """Ends all ranks after a step has failed at `place`, this process's part of the model.
        Returns the error to raise: the end of another rank, if that is the cause.
        """
        self._is_lost.wait(NOTICE_S)
        return self._die(self._lost or error, place)

    def send(self, message: ToRank) -> None:
        data = self._encoder.encode(message)
        for rank in self._ranks:
            rank.send(data)

    def expect(self, kind: type[Message]) -> list[Message]:
        """Returns the next message of each rank, in rank order; raises the reason if a rank
        ends.
        """
        return [rank.expect(kind) for rank in self._ranks]

    def close(self, *, patience_s: float = END_S) -> None:
        """Ends all ranks; later calls do nothing.

        If a rank was lost, the others wait for it and never read the message, so they are killed at
        once.
        """
        for rank in self._ranks:
            rank.is_closing = True
        self.send(CloseRank())
        end = time.monotonic() + (patience_s if self._lost is None else 0.0)
        for rank in self._ranks:
            rank.close(max(0.0, end - time.monotonic()))
        self._ranks.clear()

    def _die(self, error: Exception, place: str) -> EngineDead:
        """Ends all ranks at the first failure, since they are out of step afterwards."""
        if self._dead is None:
            what = (
                error.message
                if isinstance(error, OctavoError)
                else f"{place} has failed: {type(error).__name__}: {error}"
            )
            self._dead = EngineDead(f"the engine cannot run further steps: {what}")
            self.close(patience_s=0.0)
        return self._dead

    def lose(self, error: OctavoError) -> None:
        """Stores the first reason for the engine's end and kills all local ranks. Pipeline stages
        may wait for a lost rank, and this process for these stages; only killing them ends the
        wait.
        """
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
        self._is_lost.set()
        for rank in list(self._ranks):
            rank.kill()
        for on_loss in self._on_loss:
            on_loss(error)
