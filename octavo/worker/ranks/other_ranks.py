"""The other ranks as the first one sees them: has them started, talks to all of them alike, and
notices when one is gone.

A rank that ends, for whatever reason, takes the engine along: its weights and KV are lost.
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
from typing import Any, Protocol, TypeVar

import msgspec

from octavo.api.errors import EngineDead, OctavoError
from octavo.engine.protocol.kv_messages import ConnectorReport
from octavo.executor.ranks import Rendezvous
from octavo.utils.child_process import ChildFailed, describe_exit, end_process, start_bound
from octavo.worker.ranks.messages import CloseRank, FromRank, RankReport, RankSetup, ToRank

MAIN = "octavo.worker.ranks.process:main"
END_S = 5.0
"""Time that closed ranks have to end before they are killed, in seconds."""
NOTICE_S = 5.0
"""Time within which the loss of a rank is noticed once its connections have broken, in seconds."""

Message = TypeVar("Message", bound=FromRank)
OnReport = Callable[[int, ConnectorReport], None]
"""Is told, from another thread, what a rank reports."""
OnLoss = Callable[[OctavoError], None]
"""Is told, from another thread, why a rank has ended."""


@dataclass(frozen=True, slots=True)
class StartedRank:
    """Another rank, which waits for its first message."""

    connection: Connection
    process: subprocess.Popen[bytes] | None
    """Process of the rank; None where it is another machine's."""


class StartRank(Protocol):
    """Starts a rank, or waits until it has come."""

    def __call__(self, setup: RankSetup, inherited: tuple[int, ...]) -> StartedRank:
        """`inherited` are the descriptors that its process inherits."""
        ...


def start_here(setup: RankSetup, inherited: tuple[int, ...]) -> StartedRank:
    """Starts a rank as a process of this machine, which ends with this one."""
    connection, theirs = Pipe()
    # The kernel counts the thread that starts a process as its parent, so the child may be
    # killed with that thread only if it is the main one, which lives as long as the process.
    dies_with_parent = int(threading.current_thread() is threading.main_thread())
    arguments = [str(theirs.fileno()), str(dies_with_parent)]
    process = start_bound(MAIN, arguments, pass_fds=[theirs.fileno(), *inherited])
    theirs.close()
    return StartedRank(connection, process)


class RankLink:
    """The connection to one other rank, and a thread that reads what it says."""

    def __init__(self, setup: RankSetup, started: StartedRank, on_loss: OnLoss) -> None:
        self._name = f"rank {setup.rank} of {setup.num_ranks}"
        self._rank = setup.rank
        self._on_loss = on_loss
        self.on_report: OnReport | None = None
        """Set before the rank has anything to report."""
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._said: queue.SimpleQueue[FromRank | OctavoError] = queue.SimpleQueue()
        self.is_closing = False
        """Whether it was told to end, so that its end is no loss."""
        self._connection = started.connection
        self.process = started.process
        self._reader = threading.Thread(
            target=self._read, name=f"octavo-rank-{setup.rank}", daemon=True
        )
        self._reader.start()
        self.send(msgspec.msgpack.encode(setup))

    def send(self, message: bytes) -> None:
        """Sends a message; does nothing if the rank is gone, which `on_loss` tells."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(message)

    def expect(self, kind: type[Message]) -> Message:
        """Returns what the rank says next; raises why it has ended if it has."""
        said = self._said.get()
        if isinstance(said, OctavoError):
            raise said
        assert isinstance(said, kind)
        return said

    def kill(self) -> None:
        """Ends a process of this machine at once, whatever it waits for."""
        if self.process is not None:
            with contextlib.suppress(OSError):  # it has ended
                self.process.kill()

    def close(self, patience_s: float) -> None:
        """Waits for a rank that was told to end, and kills it if that takes longer; one of another
        machine loses its connection, and ends with it.
        """
        if self.process is not None:
            end_process(self.process, patience_s)
        else:
            self._reader.join(patience_s)
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(self._connection.fileno())) as peer,
            ):
                peer.shutdown(socket.SHUT_RDWR)  # which ends a read that waits
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        lost: OctavoError | None = None
        try:
            while lost is None:
                said = self._decoder.decode(self._connection.recv_bytes())
                if isinstance(said, ChildFailed):
                    lost = said.error(self._name)
                elif isinstance(said, RankReport):
                    assert self.on_report is not None, "it is told of no slots before"
                    self.on_report(self._rank, said.report)
                else:
                    self._said.put(said)
        except (EOFError, OSError):
            lost = EngineDead(f"{self._name} has ended ({self._describe_end()})")
        if not self.is_closing:
            self._said.put(lost)
            self._on_loss(lost)

    def _describe_end(self) -> str:
        if self.process is None:
            return "its connection has broken"
        return describe_exit(self.process.wait())


class OtherRanks:
    """Ranks 1 to num_ranks - 1, started at once."""

    def __init__(
        self,
        build: str,
        options: dict[str, Any],
        num_ranks: int,
        rendezvous: Rendezvous,
        start: StartRank = start_here,
    ) -> None:
        """`build` names a `process.BuildRank`, "module:function"."""
        self.num_ranks = num_ranks
        self._encoder = msgspec.msgpack.Encoder()
        self._lost: OctavoError | None = None
        self._dead: EngineDead | None = None
        """Error of every step from the first fault of any rank on."""
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
        """Processes of this machine."""
        return [rank.process.pid for rank in self._ranks if rank.process is not None]

    @property
    def lost(self) -> OctavoError | None:
        """Reason why the first rank that ended by itself did so; None while all live."""
        return self._lost

    def when_lost(self, on_loss: OnLoss) -> None:
        """Arranges for one call of `on_loss` when a rank has ended by itself; now if one has."""
        with self._lock:
            if self._lost is None:
                self._on_loss.append(on_loss)
                return
        on_loss(self._lost)

    def when_reported(self, on_report: OnReport) -> None:
        """Arranges for a call of `on_report` with each report of a rank."""
        for rank in self._ranks:
            rank.on_report = on_report

    def check(self) -> None:
        """Raises EngineDead from the first fault of any rank on."""
        if self._lost is not None:
            self._die(self._lost, "")
        if self._dead is not None:
            raise self._dead

    def ended_by(self, error: Exception, place: str) -> EngineDead:
        """Ends all ranks after a step has failed at `place`, this process's part of the model, and
        returns the error to raise: why a rank has ended by itself, where that was the reason.
        """
        self._is_lost.wait(NOTICE_S)
        return self._die(self._lost or error, place)

    def send(self, message: ToRank) -> None:
        data = self._encoder.encode(message)
        for rank in self._ranks:
            rank.send(data)

    def expect(self, kind: type[Message]) -> list[Message]:
        """Returns the next message of each rank, in rank order; raises why one has ended."""
        return [rank.expect(kind) for rank in self._ranks]

    def close(self, *, patience_s: float = END_S) -> None:
        """Ends all ranks; does nothing the second time.

        Ranks that wait for one that is lost never see the message, so they are killed at once.
        """
        for rank in self._ranks:
            rank.is_closing = True
        self.send(CloseRank())
        end = time.monotonic() + (patience_s if self._lost is None else 0.0)
        for rank in self._ranks:
            rank.close(max(0.0, end - time.monotonic()))
        self._ranks.clear()

    def _die(self, error: Exception, place: str) -> EngineDead:
        """Ends all ranks at the first fault: once out of step, none of them is of any use."""
        if self._dead is None:
            what = (
                error.message
                if isinstance(error, OctavoError)
                else f"{place} has failed: {type(error).__name__}: {error}"
            )
            self._dead = EngineDead(f"the engine can compute nothing any more: {what}")
            self.close(patience_s=0.0)
        return self._dead

    def lose(self, error: OctavoError) -> None:
        """Notes why the engine has ended, the first time, and ends all ranks of this machine: they
        may wait for the lost one in another stage than the first rank's, where nothing else ends
        that, and this process then waits for them.
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
