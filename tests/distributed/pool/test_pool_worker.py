"""Blocks in a store that several engines share: whatever the store does is a hit or a miss. It is a
dict here, and Mooncake's own where that is installed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from octavo.distributed.pool import pool_worker
from octavo.distributed.pool.mooncake_pool import MooncakePool, check_pool
from octavo.distributed.pool.pool_worker import MAX_BATCH, PoolWorker
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockKey,
    BlockPin,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
)
from octavo.worker.cache_engine import HostShape
from tests.support.fake_store import FakeStore
from tests.support.store_pool import StorePool, require_mooncake_store

NUM_BYTES = 1000
NUM_SLOTS = 2 * MAX_BATCH + 10
FAR = 1e12
"""A time far in the future, in seconds since 1970."""


def key_of(number: int, num_extras: int = 0) -> BlockKey:
    extras = tuple(bytes([at]) * 32 for at in range(num_extras))
    return BlockKey(number.to_bytes(16, "big"), bytes(16), (number,) * 16, extras)


def name_of(number: int, group: int = 0) -> BlockHashWithGroupId:
    return BlockHashWithGroupId(group, key_of(number).digest)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def worker(store: FakeStore) -> Iterator[PoolWorker]:
    worker = worker_over(store)
    yield worker
    worker.close()
    assert store.closed


def worker_over(store: FakeStore, fingerprint: bytes = bytes(32)) -> PoolWorker:
    shapes = [HostShape(NUM_SLOTS, NUM_BYTES), HostShape(4, 2 * NUM_BYTES)]
    return PoolWorker(shapes, store, fingerprint)


def reported(worker: PoolWorker, num_blocks: int = 1) -> ConnectorReport:
    """Waits until as many blocks have been reported; returns all that was."""
    whole = ConnectorReport()
    for _ in range(400):
        report = worker.report(wait_s=0.05)
        if report is not None:
            for name in ("fetched", "not_fetched", "kept", "not_kept", "overdue"):
                getattr(whole, name).extend(getattr(report, name))
            whole.stored = report.stored
        ended = (whole.fetched, whole.not_fetched, whole.kept, whole.not_kept)
        if sum(map(len, ended)) >= num_blocks:
            return whole
    raise AssertionError("there was no report")


def keep(worker: PoolWorker, number: int, slot: int = 0, group: int = 0) -> ConnectorReport:
    worker.slot(group, slot)[:] = number
    worker.begin(ConnectorPlan(keep=[SlotBlock(group, slot, key_of(number))]))
    return reported(worker)


def fetch(worker: PoolWorker, number: int, slot: int = 1, group: int = 0) -> ConnectorReport:
    worker.begin(ConnectorPlan(fetch=[SlotBlock(group, slot, key_of(number))]))
    return reported(worker)


def test_many_blocks_go_and_come_several_at_a_time(worker: PoolWorker, store: FakeStore) -> None:
    numbers = range(2 * MAX_BATCH + 3)
    for number in numbers:
        worker.slot(0, number)[:] = number
    blocks = [SlotBlock(0, number, key_of(number)) for number in numbers]
    worker.begin(ConnectorPlan(keep=blocks))
    assert reported(worker, len(numbers)).kept == [name_of(number) for number in numbers]
    for number in numbers:
        worker.slot(0, number)[:] = 255
    worker.begin(ConnectorPlan(fetch=blocks))
    assert len(reported(worker, len(numbers)).fetched) == len(numbers)
    for number in numbers:
        assert (worker.slot(0, number) == number).all()
    assert store.num_gets < len(numbers)


def test_groups_and_models_have_keys_of_their_own(worker: PoolWorker, store: FakeStore) -> None:
    assert keep(worker, 7).kept and keep(worker, 7, group=1).kept
    assert fetch(worker, 7, group=1).fetched and (worker.slot(1, 1) == 7).all()
    other = worker_over(store, b"x" * 32)
    assert fetch(other, 7).not_fetched == [name_of(7)]
    other.close()


def test_what_is_absent_forgotten_or_reset_is_a_miss(worker: PoolWorker, store: FakeStore) -> None:
    assert fetch(worker, 7).not_fetched == [name_of(7)]
    keep(worker, 7)
    keep(worker, 8)
    worker.begin(ConnectorPlan(forget=[name_of(7)]))
    keep(worker, 9)  # comes behind it
    assert fetch(worker, 7).not_fetched and fetch(worker, 8).fetched
    store.values["another/key"] = b""
    worker.begin(ConnectorPlan(forget_all=True))
    keep(worker, 10)
    assert fetch(worker, 8).not_fetched and fetch(worker, 10).fetched
    assert "another/key" in store.values


@pytest.mark.parametrize("place", [0, 40, -1], ids=["header", "block", "checksum"])
def test_a_damaged_value_is_a_miss_and_leaves_the_slot(
    worker: PoolWorker, store: FakeStore, place: int
) -> None:
    keep(worker, 7)
    (key,) = store.values
    data = bytearray(store.values[key])
    data[place] ^= 1
    store.values[key] = bytes(data)
    worker.slot(0, 1)[:] = 9
    report = fetch(worker, 7)
    assert report.not_fetched and report.stored is not None and report.stored.num_damaged == 1
    assert (worker.slot(0, 1) == 9).all()


def test_a_failed_write_pauses_writing(
    worker: PoolWorker, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_worker, "PAUSE_S", 0.5)
    store.fails_writes = True
    report = keep(worker, 7)
    assert report.not_kept and report.stored is not None and report.stored.num_write_errors == 1
    store.fails_writes = False
    assert keep(worker, 8).not_kept and store.num_puts == 1
    monkeypatch.setattr(worker, "writes_from", 0.0)
    assert keep(worker, 9).kept


def test_a_long_failed_read_pauses_reading(worker: PoolWorker, store: FakeStore) -> None:
    """One that fails at once does not."""
    keep(worker, 7)
    store.fails_reads = True
    assert fetch(worker, 7).not_fetched
    store.fails_reads = False
    assert fetch(worker, 7).fetched
    store.fails_reads, store.delay_s = True, pool_worker.LONG_S
    assert fetch(worker, 7).not_fetched
    store.fails_reads, store.delay_s = False, 0.0
    num_gets = store.num_gets
    assert fetch(worker, 7).not_fetched and store.num_gets == num_gets


def test_a_slow_read_is_late_and_comes_afterwards(
    worker: PoolWorker, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_worker, "OVERDUE_S", 0.1)
    keep(worker, 7)
    store.delay_s = 1.0
    report = fetch(worker, 7)
    assert report.overdue == [name_of(7)] and report.fetched == [name_of(7)]


def test_a_block_of_too_many_images_is_not_kept(worker: PoolWorker) -> None:
    key = key_of(7, num_extras=100)
    worker.begin(ConnectorPlan(keep=[SlotBlock(0, 0, key)], fetch=[SlotBlock(0, 1, key_of(8))]))
    report = reported(worker, 2)
    assert report.not_kept and report.not_fetched


def test_pinned_blocks_are_asked_to_stay(worker: PoolWorker, store: FakeStore) -> None:
    worker.begin(ConnectorPlan(pin=[BlockPin(name_of(7), FAR), BlockPin(name_of(8), 1.0)]))
    for number in (7, 8, 9):
        keep(worker, number)
    assert [key[33:65] for key in store.pinned] == [key_of(7).digest.hex()]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_of_mooncakes_own_that_dies_is_misses_and_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All values lie on one node, which is killed. Nothing waits for it long, writing pauses, and
    once another node is there blocks are kept and found again.
    """
    require_mooncake_store()
    monkeypatch.setattr(pool_worker, "READ_PAUSE_S", 0.0)
    pool = StorePool(1)
    try:
        store = MooncakePool(check_pool(pool.url), lends_bytes=0, num_replicas=1)
        worker = worker_over(store)
        assert keep(worker, 7).kept and fetch(worker, 7).fetched
        pool.nodes[0].kill()
        pool.nodes[0].wait()
        began = time.monotonic()
        assert fetch(worker, 7).not_fetched
        report = keep(worker, 8)
        assert report.not_kept and report.stored is not None
        assert report.stored.num_write_errors == 1
        assert time.monotonic() - began < 2 * pool_worker.OVERDUE_S
        assert worker.writes_from > time.monotonic() + pool_worker.PAUSE_S / 2
        began = time.monotonic()
        assert keep(worker, 9).not_kept and time.monotonic() - began < 1
        pool.nodes.append(pool.start_node())
        end, number = time.monotonic() + 90, 10
        while not keep(worker, number).kept:
            assert time.monotonic() < end, "the new node takes nothing"
            worker.writes_from, number = 0.0, number + 1
            time.sleep(0.5)
        assert fetch(worker, number, slot=2).fetched
        assert (worker.slot(0, 2) == number).all()
        worker.close()
    finally:
        pool.close()
