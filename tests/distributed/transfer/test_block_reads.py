"""Blocks that are read out of another engine's memory: by a mover within this process, by sockets,
and by Mooncake's transfer engine and NIXL where they are installed.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.distributed.transfer import block_fetcher, block_reader, send_buffer
from octavo.distributed.transfer.address import TransferAddresses
from octavo.distributed.transfer.block_sender import BlockArena
from octavo.distributed.transfer.block_transport import (
    PIECE_BYTES,
    BlockTransport,
    RemoteBytes,
    split_reads,
)
from octavo.distributed.transfer.socket_mover import SocketMover
from octavo.distributed.transfer.transfer_worker import TransferWorker
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockKey,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
)
from octavo.worker.cache_engine import HostShape
from tests.support.free_ports import free_port

NUM_BYTES = 3 << 20


class LocalMover:
    """A mover within one process, which may be told to wait, to fail and to harm what it reads."""

    def __init__(self) -> None:
        self.session = "here"
        self.registered: list[NDArray[np.uint8]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.has_begun = threading.Event()
        self.num_reads = 0
        self.fails = self.harms = self.closed = False

    def register(self, memory: NDArray[np.uint8]) -> None:
        self.registered.append(memory)

    def read(self, session: str, wanted: Sequence[RemoteBytes]) -> Iterator[RemoteBytes]:
        assert session == "here"
        self.has_begun.set()
        self.num_reads += 1
        self.may_go_on.wait(10)
        for piece in split_reads(wanted):
            ctypes.memmove(piece.into.ctypes.data, piece.address, len(piece.into))
            piece.into[0] ^= self.harms
        if not self.fails:
            yield from wanted

    def close(self) -> None:
        self.closed = True


def sockets() -> BlockTransport:
    return SocketMover("127.0.0.1")


def mooncake() -> BlockTransport:
    pytest.importorskip("mooncake.engine", reason="mooncake is not installed", exc_type=ImportError)
    from octavo.distributed.transfer.mooncake_mover import MooncakeMover

    return MooncakeMover("127.0.0.1")


def nixl() -> BlockTransport:
    pytest.importorskip("nixl._api", reason="nixl is not installed", exc_type=ImportError)
    from octavo.distributed.transfer.nixl_mover import NixlMover

    return NixlMover()


def worker_of(
    mover: BlockTransport, listen: str | None, max_bytes: int = 16 << 20
) -> TransferWorker:
    ends = TransferAddresses(bytes(32), listen, None, 5.0, max_bytes)
    return TransferWorker([HostShape(4, NUM_BYTES)], ends, mover)


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), bytes(16), (number,))


def name_of(number: int) -> BlockHashWithGroupId:
    return BlockHashWithGroupId(0, key_of(number).digest)


def keep(worker: TransferWorker, number: int, slot: int = 0) -> None:
    worker.slot(0, slot)[:] = np.random.default_rng(number).integers(0, 256, NUM_BYTES, np.uint8)
    worker.begin(ConnectorPlan(keep=[SlotBlock(0, slot, key_of(number))]))


def fetch(worker: TransferWorker, source: str, number: int, slot: int = 1) -> None:
    worker.begin(ConnectorPlan(fetch=[SlotBlock(0, slot, key_of(number), source)]))


def reported(worker: TransferWorker) -> ConnectorReport:
    for _ in range(400):
        report = worker.report(wait_s=0.05)
        if report is not None:
            return report
    raise AssertionError("there was no report")


class Pair:
    """An engine that computes blocks and one that reads them."""

    def __init__(self, movers: Sequence[BlockTransport], max_bytes: int = 16 << 20) -> None:
        self.source = f"tcp://127.0.0.1:{free_port()}"
        self.sender = worker_of(movers[0], self.source, max_bytes)
        self.reader = worker_of(movers[1], None)

    def close(self) -> None:
        self.sender.close()
        self.reader.close()


@pytest.fixture
def movers() -> list[LocalMover]:
    return [LocalMover(), LocalMover()]


@pytest.fixture
def pair(movers: list[LocalMover]) -> Iterator[Pair]:
    pair = Pair(movers)
    yield pair
    pair.close()
    assert all(mover.closed for mover in movers)


@pytest.mark.parametrize("make", [LocalMover, sockets, mooncake, nixl])
def test_blocks_are_read_whole_before_and_after_they_are_computed(make) -> None:
    pair = Pair([make(), make()])
    try:
        keep(pair.sender, 7)
        assert reported(pair.sender).kept == [name_of(7)]
        fetch(pair.reader, pair.source, 7)
        assert reported(pair.reader).fetched == [name_of(7)]
        assert (pair.reader.slot(0, 1) == pair.sender.slot(0, 0)).all()
        fetch(pair.reader, pair.source, 8, slot=2)
        time.sleep(0.1)
        keep(pair.sender, 8, slot=3)
        assert reported(pair.reader).fetched == [name_of(8)]
        assert (pair.reader.slot(0, 2) == pair.sender.slot(0, 3)).all()
    finally:
        pair.close()


@pytest.mark.parametrize("how", ["fails", "harms"])
def test_a_block_that_does_not_come_whole_is_a_miss(
    pair: Pair, movers: list[LocalMover], how: str
) -> None:
    setattr(movers[1], how, True)
    keep(pair.sender, 7)
    fetch(pair.reader, pair.source, 7)
    assert reported(pair.reader).not_fetched == [name_of(7)]


def test_a_slot_that_is_being_written_is_not_given_back(
    pair: Pair, movers: list[LocalMover]
) -> None:
    """The request went away in the middle of the read; its slot is free once the read has ended."""
    movers[1].may_go_on.clear()
    keep(pair.sender, 7)
    fetch(pair.reader, pair.source, 7)
    assert movers[1].has_begun.wait(10)
    pair.reader.begin(ConnectorPlan(cancel=[name_of(7)]))
    time.sleep(0.3)
    assert pair.reader.report(wait_s=0.0) is None
    movers[1].may_go_on.set()
    assert reported(pair.reader).not_fetched == [name_of(7)]


def test_an_engine_whose_memory_is_read_need_not_say_anything(
    pair: Pair, movers: list[LocalMover], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read lasts longer than an engine that owes blocks may be silent."""
    monkeypatch.setattr(block_fetcher, "SILENCE_S", 0.2)
    movers[1].may_go_on.clear()
    keep(pair.sender, 7)
    reported(pair.sender)
    fetch(pair.reader, pair.source, 7)
    assert movers[1].has_begun.wait(10)
    time.sleep(0.6)
    assert pair.reader.report(wait_s=0.0) is None
    movers[1].may_go_on.set()
    assert reported(pair.reader).fetched == [name_of(7)]


def test_blocks_that_are_given_up_are_not_read_any_more(
    pair: Pair, movers: list[LocalMover], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is being read, and another one waits for its turn."""
    monkeypatch.setattr(block_reader, "MAX_BLOCKS", 1)
    movers[1].may_go_on.clear()
    for number in (7, 8):
        keep(pair.sender, number)
        reported(pair.sender)
        fetch(pair.reader, pair.source, number, slot=number - 6)
    assert movers[1].has_begun.wait(10)
    time.sleep(0.3)  # the second one is offered
    pair.reader.begin(ConnectorPlan(cancel=[name_of(7), name_of(8)]))
    time.sleep(0.3)
    movers[1].may_go_on.set()
    missed = reported(pair.reader).not_fetched
    while len(missed) < 2:
        missed += reported(pair.reader).not_fetched
    assert sorted(missed) == [name_of(7), name_of(8)] and movers[1].num_reads == 1


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(send_buffer, "LEASE_S", 1.0)
    monkeypatch.setattr(block_fetcher, "RENEWAL_S", 0.1)
    return 1.0


def test_a_block_that_is_read_for_longer_than_a_lease_keeps_its_place(
    movers: list[LocalMover], short_leases: float
) -> None:
    """There is one place. The reader renews its lease as long as it reads, and ends it then."""
    pair = Pair(movers, max_bytes=NUM_BYTES)
    try:
        movers[1].may_go_on.clear()
        keep(pair.sender, 7)
        reported(pair.sender)
        fetch(pair.reader, pair.source, 7)
        time.sleep(1.5 * short_leases)
        keep(pair.sender, 9, slot=1)
        assert reported(pair.sender).not_kept == [name_of(9)]
        movers[1].may_go_on.set()
        assert reported(pair.reader).fetched == [name_of(7)]
        assert (pair.reader.slot(0, 1) == pair.sender.slot(0, 0)).all()
        time.sleep(0.5)  # TookBlocks comes
        keep(pair.sender, 9, slot=1)
        report = reported(pair.sender)
        assert report.kept == [name_of(9)] and report.stored is not None
        assert report.stored.num_expired_leases == 0
    finally:
        pair.close()


def test_a_reader_that_never_ends_loses_its_lease_and_takes_no_wrong_bytes(
    movers: list[LocalMover], short_leases: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is heard of it: the block's place is used for another, and what it reads then is a
    miss by its checksum.
    """
    monkeypatch.setattr(block_fetcher.BlockFetcher, "renew_leases", lambda one: None)
    pair = Pair(movers, max_bytes=NUM_BYTES)
    try:
        movers[1].may_go_on.clear()
        keep(pair.sender, 7)
        reported(pair.sender)
        fetch(pair.reader, pair.source, 7)
        time.sleep(1.5 * short_leases)
        keep(pair.sender, 9, slot=1)
        report = reported(pair.sender)
        assert report.kept == [name_of(9)] and report.stored is not None
        assert report.stored.num_expired_leases == 1
        movers[1].may_go_on.set()
        assert reported(pair.reader).not_fetched == [name_of(7)]
    finally:
        pair.close()


def test_a_place_that_was_used_again_is_noticed(movers: list[LocalMover]) -> None:
    """The sender let go of a block before it was read: other bytes lie there, which is a miss."""
    pair = Pair(movers)
    try:
        movers[1].may_go_on.clear()
        keep(pair.sender, 7)
        reported(pair.sender)
        fetch(pair.reader, pair.source, 7)
        time.sleep(0.3)
        pair.sender.begin(ConnectorPlan(forget=[name_of(7)]))
        keep(pair.sender, 9)
        assert name_of(9) in reported(pair.sender).kept
        movers[1].may_go_on.set()
        assert reported(pair.reader).not_fetched == [name_of(7)]
    finally:
        pair.close()


def test_a_block_without_a_place_goes_in_messages(movers: list[LocalMover]) -> None:
    """There is room for one block, which has a lease; what is waited for goes all the same."""
    pair = Pair(movers, max_bytes=NUM_BYTES)
    try:
        keep(pair.sender, 7)
        assert reported(pair.sender).kept == [name_of(7)]
        fetch(pair.reader, pair.source, 8)
        time.sleep(0.3)
        keep(pair.sender, 8, slot=1)
        assert reported(pair.sender).not_kept == [name_of(8)]
        assert reported(pair.reader).fetched == [name_of(8)]
        assert (pair.reader.slot(0, 1) == pair.sender.slot(0, 1)).all()
    finally:
        pair.close()


def test_an_arena_gives_each_block_a_place_of_its_own() -> None:
    arena = BlockArena(4 * 100, 100)
    places = [arena.put(np.full(90, number, np.uint8)) for number in range(5)]
    assert places[4] is None
    kept = [place for place in places if place is not None]
    assert [place[0] for place in kept] == [0, 1, 2, 3]
    arena.release(kept[2])
    again = arena.put(np.full(100, 9, np.uint8))
    assert again is not None and again.ctypes.data == kept[2].ctypes.data


def test_large_reads_are_cut() -> None:
    into = np.empty(2 * PIECE_BYTES + 5, np.uint8)
    pieces = split_reads([RemoteBytes(1000, into)])
    assert [piece.address - 1000 for piece in pieces] == [0, PIECE_BYTES, 2 * PIECE_BYTES]
    assert sum(len(piece.into) for piece in pieces) == len(into)
