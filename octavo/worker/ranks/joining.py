"""Ranks that come from other machines: the first one listens, each other one connects, shows that
it knows the secret, and says which rank it is.

From then on the connection is what a pipe to a process of this machine is. Nothing of what a peer
sends is taken before it has shown the secret, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

from octavo.api.errors import ConfigError, EngineDead
from octavo.utils.version import __version__
from octavo.worker.ranks.messages import RankSetup
from octavo.worker.ranks.other_ranks import StartedRank

JOIN_S = 600.0
"""Seconds for which the first rank waits for the others, and each of these for the first."""
HANDSHAKE_S = 5.0
"""Seconds in which one that connects must have shown the secret and said which rank it is."""
RETRY_S = 0.5
"""Seconds until a rank whose first one is not there tries again."""
NO_SECRET = b"octavo"

logger = logging.getLogger(__name__)


class RankHello(msgspec.Struct, tag=True):
    """First message of a rank that has shown the secret."""

    rank: int
    version: str


class JoiningRanks:
    """The first rank's address, at which the others are awaited."""

    def __init__(self, host: str, port: int, secret: str | None) -> None:
        """Listens from now on; ConfigError where that cannot be."""
        self._name = f"{host}:{port}"
        self._secret = _key_of(secret)
        self._come: dict[int, Connection] = {}
        """Ranks that have come before their turn."""
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(
                f"rank_address: {self._name} cannot be listened on: {error}",
                hint="name an address of this machine, and a port that is free",
            ) from error

    def start(self, setup: RankSetup, inherited: tuple[int, ...]) -> StartedRank:
        """Waits for a rank. Implements `other_ranks.StartRank`; nothing is inherited."""
        give_up_at = time.monotonic() + JOIN_S
        logger.warning(
            "rank %d of %d is awaited at %s (octavo rank)", setup.rank, setup.num_ranks, self._name
        )
        while setup.rank not in self._come:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise EngineDead(
                    f"rank_address: rank {setup.rank} of {setup.num_ranks} has not come to"
                    f" {self._name} in {JOIN_S:g} s",
                    hint=f"start it: octavo rank {self._name} --rank {setup.rank}",
                )
            self._listener.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                self._take(*self._listener.accept(), setup.num_ranks)
        return StartedRank(self._come.pop(setup.rank), None)

    def close(self) -> None:
        """Listens no longer; ranks that came and were not taken are left."""
        self._listener.close()
        for connection in self._come.values():
            connection.close()
        self._come.clear()

    def _take(self, peer: socket.socket, address: Sequence[object], num_ranks: int) -> None:
        """Takes in a rank that has connected; one that knows no secret, or is of another version,
        is left.
        """
        where, connection = str(address[0]), _connection_of(peer)
        try:
            with _within(connection, HANDSHAKE_S):
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                hello = msgspec.msgpack.decode(connection.recv_bytes(1 << 16), type=RankHello)
        except Exception as error:
            self._refuse(connection, where, f"{type(error).__name__}: {error}")
            return
        if hello.version != __version__:
            what = f"it has version {hello.version}, here is {__version__}"
            self._refuse(connection, where, what)
        elif not 0 < hello.rank < num_ranks:
            what = f"it is rank {hello.rank}, allowed are 1 to {num_ranks - 1}"
            self._refuse(connection, where, what)
        else:
            if before := self._come.pop(hello.rank, None):
                before.close()  # it was started again
            self._come[hello.rank] = connection

    def _refuse(self, connection: Connection, where: str, reason: str) -> None:
        logger.warning("one that came to %s from %s is no rank: %s", self._name, where, reason)
        connection.close()


def join_first(host: str, port: int, secret: str | None, rank: int) -> Connection:
    """Connects to the first rank, which may still have to come, and shows who this is."""
    give_up_at = time.monotonic() + JOIN_S
    while True:
        try:
            return _joined(host, port, _key_of(secret), rank)
        except (OSError, EOFError) as error:
            if time.monotonic() > give_up_at:
                raise ConfigError(
                    f"rank: {host}:{port} could not be joined in {JOIN_S:g} s: {error}",
                    hint="is an engine with that rank_address and the same secret there?",
                ) from error
        time.sleep(RETRY_S)


def _joined(host: str, port: int, key: bytes, rank: int) -> Connection:
    connection = _connection_of(socket.create_connection((host, port), HANDSHAKE_S))
    try:
        with _within(connection, HANDSHAKE_S):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send_bytes(msgspec.msgpack.encode(RankHello(rank, __version__)))
    except Exception as error:
        connection.close()
        if isinstance(error, OSError | EOFError):
            raise
        raise ConfigError(
            f"rank: {host}:{port} knows another secret, or is no engine: {error}",
            hint="give the engine and its ranks the same secret",
        ) from error
    return connection


def _key_of(secret: str | None) -> bytes:
    return NO_SECRET if secret is None else secret.encode()


def _connection_of(peer: socket.socket) -> Connection:
    """Returns a socket as a connection of messages, which blocks."""
    peer.settimeout(None)
    with contextlib.suppress(OSError):  # the other side may have gone, as the first read says
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(peer.detach())


@contextlib.contextmanager
def _within(connection: Connection, seconds: float) -> Iterator[None]:
    """Ends a connection on which a conversation takes longer, however it comes bit by bit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            with contextlib.suppress(OSError):  # the other side may have ended it
                peer.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
        if is_late.is_set():
            raise TimeoutError(f"it took longer than {seconds:g} s")
