"""Ranks on other machines: the first rank listens; every other rank connects, authenticates with
the shared secret, and sends its rank.

Then the connection is used like a pipe to a local process. Data from a peer is processed only after
it has authenticated, and nothing is unpickled.
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
"""Timeout in seconds for all ranks to connect."""
HANDSHAKE_S = 5.0
"""Timeout in seconds for a peer to authenticate and send its rank."""
RETRY_S = 0.5
"""Seconds between connection attempts to the first rank."""
NO_SECRET = b"octavo"

logger = logging.getLogger(__name__)


class RankHello(msgspec.Struct, tag=True):
    """First message of an authenticated rank."""

    rank: int
    version: str


class JoiningRanks:
    """The first rank's listener for the others."""

    def __init__(self, host: str, port: int, secret: str | None) -> None:
        """Starts listening; raises ConfigError if that fails."""
        self._name = f"{host}:{port}"
        self._secret = _get_key(secret)
        self._connected: dict[int, Connection] = {}
        """Connected ranks that have not been started yet."""
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ConfigError(
                f"rank_address: cannot listen on {self._name}: {error}",
                hint="use an address of this machine and a free port",
            ) from error

    def start(self, setup: RankSetup, inherited: tuple[int, ...]) -> StartedRank:
        """Waits until a rank has connected, and starts it. Implements `other_ranks.StartRank`."""
        give_up_at = time.monotonic() + JOIN_S
        logger.warning(
            "waiting for rank %d of %d at %s (octavo rank)", setup.rank, setup.num_ranks, self._name
        )
        while setup.rank not in self._connected:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise EngineDead(
                    f"rank_address: rank {setup.rank} of {setup.num_ranks} did not connect to"
                    f" {self._name} within {JOIN_S:g} s",
                    hint=f"start it: octavo rank {self._name} --rank {setup.rank}",
                )
            self._listener.settimeout(left_s)
            with contextlib.suppress(TimeoutError):
                self._accept(*self._listener.accept(), setup.num_ranks)
        return StartedRank(self._connected.pop(setup.rank), None)

    def close(self) -> None:
        """Stops listening, and disconnects ranks that have not been started."""
        self._listener.close()
        for connection in self._connected.values():
            connection.close()
        self._connected.clear()

    def _accept(self, peer: socket.socket, address: Sequence[object], num_ranks: int) -> None:
        """Accepts a connected rank. Disconnects it if it fails to authenticate or has another
        version.
        """
        where, connection = str(address[0]), _make_connection(peer)
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
            what = f"it is rank {hello.rank}, expected 1 to {num_ranks - 1}"
            self._refuse(connection, where, what)
        else:
            if before := self._connected.pop(hello.rank, None):
                before.close()  # the rank was restarted
            self._connected[hello.rank] = connection

    def _refuse(self, connection: Connection, where: str, reason: str) -> None:
        logger.warning(
            "rejected a connection to %s from %s that is not a rank: %s", self._name, where, reason
        )
        connection.close()


def join_first(host: str, port: int, secret: str | None, rank: int) -> Connection:
    """Connects to the first rank, which may start later, authenticates and sends this rank."""
    give_up_at = time.monotonic() + JOIN_S
    while True:
        try:
            return _join(host, port, _get_key(secret), rank)
        except (OSError, EOFError) as error:
            if time.monotonic() > give_up_at:
                raise ConfigError(
                    f"rank: cannot connect to {host}:{port} within {JOIN_S:g} s: {error}",
                    hint="start the engine there with this rank_address and the same secret",
                ) from error
        time.sleep(RETRY_S)


def _join(host: str, port: int, key: bytes, rank: int) -> Connection:
    connection = _make_connection(socket.create_connection((host, port), HANDSHAKE_S))
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
            f"rank: {host}:{port} uses another secret, or is not an engine: {error}",
            hint="set the same rank_secret on the engine and its ranks",
        ) from error
    return connection


def _get_key(secret: str | None) -> bytes:
    return NO_SECRET if secret is None else secret.encode()


def _make_connection(peer: socket.socket) -> Connection:
    """Wraps a socket in a blocking connection for messages."""
    peer.settimeout(None)
    with contextlib.suppress(OSError):  # the other side may be gone, which the first read reports
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(peer.detach())


@contextlib.contextmanager
def _within(connection: Connection, seconds: float) -> Iterator[None]:
    """Closes a connection if the complete exchange takes longer than `seconds`."""
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        is_overdue = threading.Event()

        def end() -> None:
            is_overdue.set()
            with contextlib.suppress(OSError):  # the other side may have closed it
                peer.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
        if is_overdue.is_set():
            raise TimeoutError(f"it took longer than {seconds:g} s")
