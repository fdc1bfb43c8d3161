"""Ranks that come to the first one's address: who is taken, and who is not."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from octavo.api.errors import ConfigError, EngineDead
from octavo.config.checks import check
from octavo.config.engine_config import EngineConfig
from octavo.worker.ranks import joining
from octavo.worker.ranks.joining import JoiningRanks, join_first
from octavo.worker.ranks.messages import RankSetup
from tests.support.free_ports import free_port

SECRET = "of three ranks"


class Rendezvous:
    """A first rank that awaits two others, in a thread for each that comes."""

    def __init__(self) -> None:
        self.port = free_port()
        self.ranks = JoiningRanks("127.0.0.1", self.port, SECRET)
        self.theirs: list[tuple[int, Connection]] = []
        """Ends of the ranks that have come, by their numbers."""
        self.own: list[Connection] = []

    def come(self, rank: int, secret: str | None = SECRET) -> threading.Thread:
        def run() -> None:
            with contextlib.suppress(ConfigError):
                self.theirs.append((rank, join_first("127.0.0.1", self.port, secret, rank)))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def start(self, rank: int) -> Connection:
        """Waits for a rank; returns the first one's end."""
        setup = RankSetup("nothing:here", {}, rank, 3, [0])
        started = self.ranks.start(setup, ())
        assert started.process is None
        self.own.append(started.connection)
        return started.connection


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous()
    yield rendezvous
    rendezvous.ranks.close()
    for end in [*rendezvous.own, *(end for _, end in rendezvous.theirs)]:
        end.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "JOIN_S", 1.5)
    monkeypatch.setattr(joining, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(joining, "RETRY_S", 0.05)


def test_ranks_come_in_any_order_and_are_told_apart(rendezvous: Rendezvous) -> None:
    threads = [rendezvous.come(2), rendezvous.come(1)]
    first, second = rendezvous.start(1), rendezvous.start(2)
    for thread in threads:
        thread.join(10)
    for number, end in ((1, first), (2, second)):
        end.send_bytes(bytes([number]))
    assert all(end.recv_bytes() == bytes([rank]) for rank, end in rendezvous.theirs)


@pytest.mark.usefixtures("soon")
def test_one_that_goes_at_once_or_speaks_bit_by_bit_holds_up_no_other(
    rendezvous: Rendezvous,
) -> None:
    """Whatever looks for open ports ends its connection before it can be looked at."""
    with socket.create_connection(("127.0.0.1", rendezvous.port)) as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    slow = socket.create_connection(("127.0.0.1", rendezvous.port))

    def drip() -> None:
        with contextlib.suppress(OSError):
            for _ in range(100):
                slow.sendall(bytes([0]))
                time.sleep(0.1)

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    began = time.monotonic()
    coming = rendezvous.come(1)
    end = rendezvous.start(1)
    assert time.monotonic() - began < 1.4
    coming.join(10)
    end.send_bytes(b"here")
    assert rendezvous.theirs[0][1].recv_bytes() == b"here"
    slow.close()
    dripping.join(10)


@pytest.mark.usefixtures("soon")
def test_those_without_the_secret_are_left_and_hold_up_no_other(
    rendezvous: Rendezvous, caplog: pytest.LogCaptureFixture
) -> None:
    """Another secret, none, a number that is no rank, bytes that mean nothing, and silence."""
    silent = socket.create_connection(("127.0.0.1", rendezvous.port))
    noise = socket.create_connection(("127.0.0.1", rendezvous.port))
    noise.sendall(b"\x00\x00\x00\x20" + bytes(32))
    rendezvous.come(1, "another")
    rendezvous.come(1, None)
    rendezvous.come(7)
    time.sleep(0.2)
    rendezvous.come(1)
    rendezvous.start(1)
    assert caplog.text.count("that is not a rank") >= 4
    silent.close()
    noise.close()


def test_a_rank_that_is_started_again_before_its_turn_takes_its_place(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[socket.socket] = []
    connect = socket.create_connection

    def create_connection(address: tuple[str, int], timeout_s: float) -> socket.socket:
        connected.append(connect(address, timeout_s))
        return connected[-1]

    monkeypatch.setattr(joining.socket, "create_connection", create_connection)
    coming = []
    for rank in (2, 2, 1):
        coming.append(rendezvous.come(rank))
        while len(connected) < len(coming):
            time.sleep(0.01)
    rendezvous.start(1)
    end = rendezvous.start(2)
    for thread in coming:
        thread.join(10)
    end.send_bytes(b"x")
    found = []
    for rank, end in rendezvous.theirs:
        if rank == 2:
            try:
                found.append(end.recv_bytes())
            except (EOFError, OSError):
                found.append(b"lost")
    assert sorted(found) == [b"lost", b"x"]


@pytest.mark.usefixtures("soon")
def test_a_rank_that_does_not_come_is_named(rendezvous: Rendezvous) -> None:
    with pytest.raises(
        EngineDead, match=r"rank 2 of 3 did not connect to 127.0.0.1:\d+ within 1.5 s"
    ):
        rendezvous.start(2)


@pytest.mark.usefixtures("soon")
def test_a_first_rank_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot connect to 127.0.0.1:\d+ within 1.5 s"):
        join_first("127.0.0.1", free_port(), None, 1)


def test_an_address_that_is_taken_is_named(rendezvous: Rendezvous) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        JoiningRanks("127.0.0.1", rendezvous.port, None)


TORCH = {"backend": "torch", "device": "cpu", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"backend": "native", "tensor_parallel_size": 2}, "requires the torch backend"),
        ({"backend": "torch"}, "requires one engine with several ranks"),
        ({**TORCH, "data_parallel_size": 2}, "requires one engine with several ranks"),
        ({**TORCH, "rank_address": "8990"}, "expected HOST:PORT"),
        ({**TORCH, "rank_address": "0.0.0.0:8990"}, "expected HOST:PORT"),
        ({**TORCH, "rank_address": "10.0.0.1:8990"}, "without rank_secret"),
        ({**TORCH, "rank_address": None, "rank_secret": "x"}, "requires rank_address"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], refused: str) -> None:
    given = {"rank_address": "127.0.0.1:8990", **options}
    with pytest.raises(ConfigError, match=refused):
        check(EngineConfig.from_options(model="none", **given))
