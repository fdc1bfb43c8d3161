"""Memory that is read over plain TCP: what may be read, by which readers, and how a read ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.distributed.transfer import memory_server, socket_mover
from octavo.distributed.transfer.block_transport import RemoteBytes
from octavo.distributed.transfer.memory_server import COUNT, TOKEN_BYTES, MemoryServer
from octavo.distributed.transfer.socket_mover import SocketMover

NUM_BYTES = 3 << 20
HOST = "127.0.0.1"


@pytest.fixture
def memory() -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, NUM_BYTES, np.uint8)


@pytest.fixture
def lender(memory: NDArray[np.uint8]) -> Iterator[SocketMover]:
    mover = SocketMover(HOST)
    mover.register(np.zeros(100, np.uint8))
    mover.register(memory)
    yield mover
    mover.close()


@pytest.fixture
def reader() -> Iterator[SocketMover]:
    mover = SocketMover(None)
    yield mover
    mover.close()


def wanted_of(memory: NDArray[np.uint8], *ranges: tuple[int, int]) -> list[RemoteBytes]:
    """Returns reads of ranges of memory, from a first byte up to another, into new memory."""
    return [
        RemoteBytes(memory.ctypes.data + first, np.zeros(end - first, np.uint8))
        for first, end in ranges
    ]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Lists the addresses that are connected to from now on."""
    addresses: list[tuple[str, int]] = []
    connect = socket.create_connection

    def note(address, **options):
        addresses.append(address)
        return connect(address, **options)

    monkeypatch.setattr(socket, "create_connection", note)
    return addresses


def test_ranges_come_in_their_order_over_one_connection(
    lender: SocketMover,
    reader: SocketMover,
    memory: NDArray[np.uint8],
    monkeypatch: pytest.MonkeyPatch,
    connected: list[tuple[str, int]],
) -> None:
    """Also more of them than go into one request."""
    monkeypatch.setattr(socket_mover, "MAX_RANGES", 2)
    ranges = [(0, NUM_BYTES), (5, 6), (NUM_BYTES - 1000, NUM_BYTES), (7, 70_000), (0, 1)]
    for _ in range(2):
        wanted = wanted_of(memory, *ranges)
        for place, one in enumerate(reader.read(lender.session, wanted)):
            first, end = ranges[place]
            assert one is wanted[place] and (one.into == memory[first:end]).all()
        assert place == len(ranges) - 1
    assert len(connected) == 1


@pytest.mark.parametrize(
    "outside", [(-1, 10), (NUM_BYTES - 5, NUM_BYTES + 1), (2 * NUM_BYTES, 2 * NUM_BYTES + 4)]
)
def test_what_is_not_registered_cannot_be_read(
    lender: SocketMover, reader: SocketMover, memory: NDArray[np.uint8], outside: tuple[int, int]
) -> None:
    """The whole request is refused; the next one goes over a new connection."""
    wanted = wanted_of(memory, (0, 10), outside)
    assert list(reader.read(lender.session, wanted)) == []
    assert not any(one.into.any() for one in wanted)
    assert len(list(reader.read(lender.session, wanted[:1]))) == 1


def test_a_reader_without_the_token_is_left(lender: SocketMover) -> None:
    address, _, token = lender.session.partition("/")
    host, port = address.split(":")
    wrong = bytes([bytes.fromhex(token)[0] ^ 1]) + bytes.fromhex(token)[1:]
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(wrong)
        assert connection.recv(1) == b""


def test_a_request_of_too_many_ranges_is_refused(lender: SocketMover) -> None:
    address, _, token = lender.session.partition("/")
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(bytes.fromhex(token) + COUNT.pack(memory_server.MAX_RANGES + 1))
        assert connection.recv(1) == b""


def test_silent_readers_keep_no_place_for_good(monkeypatch, memory: NDArray[np.uint8]) -> None:
    """Further ones are closed at once; one that shows no token leaves its place to another."""
    monkeypatch.setattr(memory_server, "MAX_READERS", 1)
    monkeypatch.setattr(memory_server, "SEND_TIMEOUT_S", 0.3)
    server = MemoryServer(HOST)
    server.register(memory)
    reader = SocketMover(None)
    port = int(server.session.partition("/")[0].rpartition(":")[2])
    try:
        with (
            socket.create_connection((HOST, port), timeout=5) as silent,
            socket.create_connection((HOST, port), timeout=5) as further,
        ):
            assert further.recv(1) == b""
            assert silent.recv(1) == b""
        end = time.monotonic() + 5
        while not list(reader.read(server.session, wanted_of(memory, (0, 5)))):
            assert time.monotonic() < end
    finally:
        reader.close()
        server.close()


def test_an_engine_that_ends_in_the_middle_leaves_the_rest_unread(
    reader: SocketMover, memory: NDArray[np.uint8]
) -> None:
    lender = SocketMover(HOST)
    lender.register(memory)
    wanted = wanted_of(memory, *[(0, NUM_BYTES)] * 20)
    read = reader.read(lender.session, wanted)
    assert next(read) is wanted[0]
    lender.close()
    assert len(list(read)) < len(wanted) - 1
    assert list(reader.read(lender.session, wanted[:1])) == [], "it is there no more"


def test_an_engine_that_stands_still_is_given_up(
    reader: SocketMover, memory: NDArray[np.uint8], monkeypatch
) -> None:
    """It accepts, sends some bytes, and then nothing."""
    monkeypatch.setattr(socket_mover, "TIMEOUT_S", 0.3)
    with socket.create_server((HOST, 0)) as server:

        def stand_still() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(4))
                may_end.wait(10)

        may_end = threading.Event()
        thread = threading.Thread(target=stand_still)
        thread.start()
        session = f"{HOST}:{server.getsockname()[1]}/{bytes(TOKEN_BYTES).hex()}"
        began = time.monotonic()
        assert list(reader.read(session, wanted_of(memory, (0, 100)))) == []
        assert 0.2 < time.monotonic() - began < 5
        may_end.set()
        thread.join()


@pytest.mark.parametrize("session", ["", "nowhere", "127.0.0.1:1/zz", "127.0.0.1:x/00"])
def test_a_session_that_is_none_reads_nothing(
    reader: SocketMover, memory: NDArray[np.uint8], session: str
) -> None:
    assert list(reader.read(session, wanted_of(memory, (0, 1)))) == []


def test_connections_are_bounded(
    monkeypatch: pytest.MonkeyPatch, memory: NDArray[np.uint8], connected: list[tuple[str, int]]
) -> None:
    """The engine that was met first is left; it may be met again."""
    monkeypatch.setattr(socket_mover, "MAX_CONNECTIONS", 2)
    lenders, reader = [SocketMover(HOST) for _ in range(3)], SocketMover(None)
    try:
        for lender in [*lenders, lenders[0]]:
            lender.register(memory)
            assert len(list(reader.read(lender.session, wanted_of(memory, (0, 9))))) == 1
        assert len(connected) == 4
    finally:
        for mover in [*lenders, reader]:
            mover.close()
