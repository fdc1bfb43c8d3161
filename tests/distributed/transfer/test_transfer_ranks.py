"""Blocks between the workers of two engines whose ranks share out the KV heads in other ways, in
messages and out of memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from octavo.distributed.transfer import block_fetcher
from octavo.distributed.transfer.address import TransferAddresses, join_endpoints
from octavo.distributed.transfer.kv_head_partition import GroupHeads, KVHeadPartition
from octavo.distributed.transfer.messages import PART_BYTES
from octavo.distributed.transfer.report_box import ReportBox, SentReports
from octavo.distributed.transfer.send_buffer import SendBuffer
from octavo.distributed.transfer.socket_mover import SocketMover
from octavo.distributed.transfer.transfer_worker import TransferWorker
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockKey,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
)
from octavo.engine.protocol.kv_messages import StreamedBlock as Streamed
from octavo.executor.kv import HeadRows
from octavo.worker.cache_engine import HostShape
from tests.support.free_ports import free_port

NUM_SLOTS = 6
HEADS = GroupHeads(4, (HeadRows(70, 4096), HeadRows(30, 64), HeadRows(7, 512)))
"""Heads of which two are more than one message."""
assert 2 * HEADS.head_bytes > PART_BYTES
LATENT = GroupHeads(1, (HeadRows(3, 1000),))
BY_LAYER = GroupHeads(4, (HeadRows(5, 1000),))
GROUPS = (HEADS, LATENT)
SIZES = [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (1, 4), (3, 2), (2, 8), (8, 1)]


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), bytes(16), (number,))


def bytes_of(group: int, number: int, heads: GroupHeads) -> Any:
    """Returns the bytes of a whole block."""
    size = heads.head_bytes * heads.num_heads
    return np.random.default_rng([group, number]).integers(0, 256, size, np.uint8)


class RankedEngine:
    """The transfer workers of one engine, each with its part of every block."""

    def __init__(
        self, groups: Sequence[GroupHeads], num_ranks: int, *, sends: bool, reads: bool = True
    ) -> None:
        """`reads`: whole parts are read out of memory."""
        self.groups = tuple(groups)
        self.reports = ReportBox(num_ranks)
        self.whole = KVHeadPartition(self.groups)
        self.ranks = [KVHeadPartition(self.groups, rank, num_ranks) for rank in range(num_ranks)]
        self.endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(num_ranks)]
        self.workers = [self._worker(rank, sends=sends, reads=reads) for rank in range(num_ranks)]

    def _worker(self, rank: int, *, sends: bool, reads: bool) -> TransferWorker:
        held = self.ranks[rank]
        spans = map(held.span, range(len(self.groups)))
        shapes = [
            HostShape(NUM_SLOTS, group.head_bytes * (last - first))
            for group, (first, last) in zip(self.groups, spans, strict=True)
        ]
        listen = self.endpoints[rank] if sends else None
        ends = TransferAddresses(bytes(32), listen, None, 10.0, 64 << 20)
        mover = SocketMover("127.0.0.1" if sends else None) if reads else None
        reports = self.reports
        if rank:
            reports = SentReports(lambda report: self.reports.add_rank(rank, report))
        return TransferWorker(shapes, ends, mover, held, reports)

    def part(self, rank: int, group: int, number: int) -> Any:
        """Returns a rank's part of a block."""
        data = bytes_of(group, number, self.groups[group])
        return self.whole.cut(group, data, self.ranks[rank].span(group))

    def begin(self, plan: ConnectorPlan) -> None:
        for worker in self.workers:
            worker.begin(plan)

    def keep(self, number: int, slot: int = 0) -> None:
        """Keeps a block of each group for others."""
        for rank, worker in enumerate(self.workers):
            for group in range(len(self.groups)):
                worker.slot(group, slot)[:] = self.part(rank, group, number)
        blocks = [SlotBlock(group, slot, key_of(number)) for group in range(len(self.groups))]
        self.begin(ConnectorPlan(keep=blocks))

    def fetch(self, source: RankedEngine, number: int, slot: int = 1) -> None:
        endpoints = join_endpoints(source.endpoints)
        groups = range(len(self.groups))
        blocks = [SlotBlock(group, slot, key_of(number), endpoints) for group in groups]
        self.begin(ConnectorPlan(fetch=blocks))

    def reported(self, count: int) -> ConnectorReport:
        """Waits until as many blocks have been told of."""
        found, end = ConnectorReport(), time.monotonic() + 30
        while time.monotonic() < end:
            report = self.workers[0].report(wait_s=0.05)
            for name in ("fetched", "not_fetched", "kept", "not_kept") if report else ():
                getattr(found, name).extend(getattr(report, name))
            told = (found.fetched, found.not_fetched, found.kept, found.not_kept)
            if sum(map(len, told)) == count:
                return found
        raise AssertionError(f"there was no report of {count} blocks: {found}")

    def check(self, number: int, slot: int = 1) -> None:
        """Checks that every rank has its part of a block, bit for bit."""
        for rank, worker in enumerate(self.workers):
            for group in range(len(self.groups)):
                assert (worker.slot(group, slot) == self.part(rank, group, number)).all()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Any:
    """Makes engines, which are closed at the test's end."""

    def make(groups: Sequence[GroupHeads], num_ranks: int, **options: Any) -> RankedEngine:
        engine = RankedEngine(groups, num_ranks, **options)
        request.addfinalizer(engine.close)
        return engine

    return make


def names(number: int) -> set[BlockHashWithGroupId]:
    return {BlockHashWithGroupId(group, key_of(number).digest) for group in range(2)}


@pytest.mark.parametrize("reads", [True, False], ids=["read", "in messages"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes[0]}-{sizes[1]}")
def test_each_rank_gets_its_heads(engines, sizes: tuple[int, int], reads: bool) -> None:
    """One block is there when it is asked for, and one is kept later."""
    sender = engines(GROUPS, sizes[0], sends=True, reads=reads)
    receiver = engines(GROUPS, sizes[1], sends=False, reads=reads)
    sender.keep(7)
    assert set(sender.reported(2).kept) == names(7)
    receiver.fetch(sender, 7, slot=1)
    receiver.fetch(sender, 8, slot=2)
    assert set(receiver.reported(2).fetched) == names(7)
    receiver.check(7, slot=1)
    sender.keep(8, slot=1)
    assert set(receiver.reported(2).fetched) == names(8)
    receiver.check(8, slot=2)


class WrittenStep:
    """Stands in for `KvLayers` of one rank: a step that has written all of its layers."""

    written = (4, 5)

    def __init__(self, block: Any, num_layers: int) -> None:
        self.block = block
        self.layers = num_layers
        self.writes = [(0, layer) for layer in range(num_layers)]

    def layer_bytes(self, group: int) -> int:
        size: int = len(self.block) // self.layers
        return size

    def read(self, group: int, layer: int, block_ids: Sequence[int]) -> Any:
        size = self.layer_bytes(group)
        return self.block[layer * size : (layer + 1) * size][None].copy()


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4)])
def test_layers_leave_in_pieces_too(engines, sizes: tuple[int, int]) -> None:
    """A block whose layers are sent while a step computes; it is never kept."""
    sender = engines([BY_LAYER], sizes[0], sends=True)
    receiver = engines([BY_LAYER], sizes[1], sends=False)
    receiver.fetch(sender, 7)
    time.sleep(0.3)
    steps = []
    for rank, worker in enumerate(sender.workers):
        step = WrittenStep(sender.part(rank, 0, 7), num_layers=5)
        steps.append(step)
        worker.begin_stream([Streamed("r", 0, 3, key_of(7))], step)  # type: ignore[arg-type]
    for step, worker in zip(steps, sender.workers, strict=True):
        step.written = (5, 5)
        worker.end_stream()
    assert receiver.reported(1).fetched == [BlockHashWithGroupId(0, key_of(7).digest)]
    receiver.check(7)


@pytest.mark.parametrize("reads", [True, False], ids=["read", "in messages"])
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (4, 2)])
def test_a_rank_that_ends_leaves_no_block_under_way(
    engines, sizes: tuple[int, int], reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of the sender is gone while its blocks are waited for: no part of these counts, and
    each is told of once on every rank. What comes later comes whole.
    """
    monkeypatch.setattr(block_fetcher, "SILENCE_S", 0.5)
    sender = engines(GROUPS, sizes[0], sends=True, reads=reads)
    receiver = engines(GROUPS, sizes[1], sends=False, reads=reads)
    receiver.fetch(sender, 7)
    time.sleep(0.2)
    sender.workers[-1].close()
    for rank, worker in enumerate(sender.workers[:-1]):
        for group in range(len(GROUPS)):
            worker.slot(group, 0)[:] = sender.part(rank, group, 7)
        worker.begin(ConnectorPlan(keep=[SlotBlock(g, 0, key_of(7)) for g in range(len(GROUPS))]))
    report = receiver.reported(2)
    assert BlockHashWithGroupId(0, key_of(7).digest) in report.not_fetched
    again = engines(GROUPS, sizes[0], sends=True, reads=reads)
    again.keep(7)
    receiver.fetch(again, 7)
    assert set(receiver.reported(2).fetched) == names(7)
    receiver.check(7)


def test_a_piece_whose_block_has_gone_is_told(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block evicted before its turn is not sent, nor are another block's bytes for it."""
    sender = engines(GROUPS, 1, sends=True)
    receiver = engines(GROUPS, 2, sends=False)
    sender.keep(7)
    sender.reported(2)
    monkeypatch.setattr(SendBuffer, "peek", lambda one, name: None)
    receiver.fetch(sender, 7)
    assert set(receiver.reported(2).not_fetched) == {BlockHashWithGroupId(0, key_of(7).digest)}


def test_a_peer_that_has_other_heads_refuses_by_name(engines, caplog) -> None:
    """Another engine has come to its address, with other ranks."""
    sender = engines(GROUPS, 4, sends=True)
    sender.keep(7)
    receiver = engines(GROUPS, 1, sends=False)
    half = engines(GROUPS, 2, sends=True)
    half.endpoints = sender.endpoints[:2]
    receiver.fetch(half, 7)
    assert set(receiver.reported(2).not_fetched) == names(7)
    assert "got the KV heads 0 to 2 of cache group 0, this rank has 0 to 1" in caplog.text


def test_ranks_that_cannot_share_the_heads_are_not_asked(engines, caplog) -> None:
    receiver = engines([GroupHeads(2, (HeadRows(1, 8),))], 1, sends=False)
    other = engines(GROUPS, 3, sends=True)
    receiver.fetch(other, 7)
    assert receiver.reported(1).not_fetched == [BlockHashWithGroupId(0, key_of(7).digest)]
    assert "the model has 2 KV heads" in caplog.text
