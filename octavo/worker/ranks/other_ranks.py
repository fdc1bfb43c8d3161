"""The other ranks, as the first one sees them: a process and a pipe each. Starts them, talks to all
alike, notices when one is gone.

A rank that ends, for whatever reason, takes the engine along: what it held of weights and KV is
lost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from octavo.errors import EngineDead, OctavoError, error_named
from octavo.worker.ranks.messages import Close, Failed, FromRank, Setup, ToRank

START = "from octavo.worker.ranks.process import main; main()"
END_S = 5.0
"""How long closed ranks may take to end before they are killed."""
NOTICE_S = 5.0
"""How long it may take until it is known that a rank is gone whose connections have broken."""

Message = TypeVar("Message", bound=FromRank)
Tell = Callable[[OctavoError], None]


class RankProcess:
    """One of them. What it says is read by a thread of its own."""

    def __init__(self, setup: Setup, when_lost: Tell) -> None:
        self._setup = setup
        self._when_lost = when_lost
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._said: queue.SimpleQueue[FromRank | OctavoError] = queue.SimpleQueue()
        self.is_closing = False
        """It may end: nothing is lost with it."""
        self._connection, theirs = Pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
        }
        # The kernel counts the thread that starts a process as its parent: only the main one lives
        # as long as this process.
        dies = int(threading.current_thread() is threading.main_thread())
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, str(theirs.fileno()), str(dies)],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()
        self._reader = threading.Thread(
            target=self._read,
            args=(self._connection,),
            name=f"octavo-rank-{setup.rank}",
            daemon=True,
        )
        self._reader.start()
        self.send(msgspec.msgpack.encode(setup))

    def send(self, message: bytes) -> None:
        """To one that is gone nothing is sent: `when_lost` has been told, or will be."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(message)

    def expect(self, kind: type[Message]) -> Message:
        """What it says next; raises why it has ended instead."""
        said = self._said.get()
        if isinstance(said, OctavoError):
            raise said
        assert isinstance(said, kind)
        return said

    def close(self, patience_s: float) -> None:
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self._connection.close()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def _read(self, connection: Connection) -> None:
        lost: OctavoError | None = None
        try:
            while lost is None:
                said = self._decoder.decode(connection.recv_bytes())
                if isinstance(said, Failed):
                    lost = self._failure(said)
                else:
                    self._said.put(said)
        except (EOFError, OSError):
            code = self.process.wait()
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            lost = EngineDead(f"{self._name} has ended ({how})")
        if not self.is_closing:
            self._said.put(lost)
            self._when_lost(lost)

    def _failure(self, failed: Failed) -> OctavoError:
        known = error_named(failed.kind, failed.message, failed.hint)
        return known or EngineDead(f"{self._name} has failed: {failed.kind}: {failed.message}")

    @property
    def _name(self) -> str:
        return f"rank {self._setup.rank} of {self._setup.num_ranks}"


class OtherRanks:
    """Ranks 1 to num_ranks - 1, started at once."""

    def __init__(self, build: str, options: dict[str, Any], num_ranks: int, port: int) -> None:
        """`build` names the `process.BuildRank` ("module:function"); `port`: where all meet."""
        self.num_ranks = num_ranks
        self._encoder = msgspec.msgpack.Encoder()
        self._lost: OctavoError | None = None
        self._is_lost = threading.Event()
        self._tell: list[Tell] = []
        self._lock = threading.Lock()
        self._ranks: list[RankProcess] = []
        try:
            for rank in range(1, num_ranks):
                self._ranks.append(
                    RankProcess(Setup(build, options, rank, num_ranks, port), self._note_loss)
                )
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    @property
    def lost(self) -> OctavoError | None:
        """Why the first of them that ended did so."""
        return self._lost

    def when_lost(self, tell: Tell) -> None:
        """`tell` is called once, from another thread, when one of them has ended by itself; at once
        where that has been.
        """
        with self._lock:
            if self._lost is None:
                self._tell.append(tell)
                return
        tell(self._lost)

    def wait_for_loss(self, timeout_s: float = NOTICE_S) -> OctavoError | None:
        self._is_lost.wait(timeout_s)
        return self._lost

    def send(self, message: ToRank) -> None:
        data = self._encoder.encode(message)
        for rank in self._ranks:
            rank.send(data)

    def expect(self, kind: type[Message]) -> list[Message]:
        """From each of them, in rank order. The error of one that has ended instead."""
        return [rank.expect(kind) for rank in self._ranks]

    def close(self, *, patience_s: float = END_S) -> None:
        """Ends them all, at once those that wait for one that is lost; may be called again."""
        for rank in self._ranks:
            rank.is_closing = True
        self.send(Close())
        end = time.monotonic() + (patience_s if self._lost is None else 0.0)
        for rank in self._ranks:
            rank.close(max(0.0, end - time.monotonic()))
        self._ranks.clear()

    def _note_loss(self, error: OctavoError) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._lost = error
        self._is_lost.set()
        for tell in self._tell:
            tell(error)
