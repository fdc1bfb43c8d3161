"""Layers of blocks that leave while a step computes, between two workers and a step of the test's
own, which writes a layer when the test says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.distributed.transfer.address import TransferAddresses
from octavo.distributed.transfer.block_sender import BlockSender
from octavo.distributed.transfer.messages import PART_BYTES
from octavo.distributed.transfer.transfer_worker import TransferWorker
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockKey,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
)
from octavo.engine.protocol.kv_messages import StreamedBlock as Streamed
from octavo.worker.cache_engine import HostShape
from tests.support.free_ports import free_port

NUM_LAYERS, LAYER_BYTES = 3, 40_000
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES
NUM_BLOCKS = 20
"""Blocks of a step: their layers go in two messages each."""
assert LAYER_BYTES < PART_BYTES < NUM_BLOCKS * LAYER_BYTES
WAIT_S = 20.0


@dataclass
class StepOfATest:
    """Stands in for `KvLayers`: two groups, whose layers are written in turns."""

    writes: list[tuple[int, int]] = field(
        default_factory=lambda: [(g, at) for at in range(NUM_LAYERS) for g in range(2)]
    )
    written: tuple[int, int] = (4, 2 * NUM_LAYERS)
    num_read: int = 0

    def __post_init__(self) -> None:
        shape = (2, NUM_BLOCKS, BLOCK_BYTES)
        self.blocks: NDArray[np.uint8] = np.random.default_rng(5).integers(0, 256, shape, np.uint8)

    def layer_bytes(self, group: int) -> int:
        return LAYER_BYTES

    def read(self, group: int, layer: int, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        assert self.written[1] > self.writes.index((group, layer)), "it is not written yet"
        self.num_read += 1
        start = layer * LAYER_BYTES
        return self.blocks[group][list(block_ids), start : start + LAYER_BYTES]

    def write(self, count: int) -> None:
        """Writes the first `count` of the coming step's layers."""
        self.written = (5, count)


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), bytes(16), (number,))


def name_of(number: int, group: int = 0) -> BlockHashWithGroupId:
    return BlockHashWithGroupId(group, key_of(number).digest)


BOTH = [(group, at) for group in range(2) for at in range(NUM_BLOCKS)]
NAMES = {name_of(at, group) for group, at in BOTH}
STREAMED = [Streamed("r", group, at, key_of(at)) for group, at in BOTH]


class Two:
    """A worker that computes, and one that fetches."""

    def __init__(self) -> None:
        self.source = f"tcp://127.0.0.1:{free_port()}"
        shapes = [HostShape(NUM_BLOCKS, BLOCK_BYTES)] * 2
        self.sender = TransferWorker(shapes, self.ends(self.source))
        self.fetcher = TransferWorker(shapes, self.ends(None))
        self.step = StepOfATest()

    @staticmethod
    def ends(listen: str | None) -> TransferAddresses:
        return TransferAddresses(bytes(32), listen, None, 10.0, 64 << 20)

    def ask(self) -> None:
        blocks = [SlotBlock(group, at, key_of(at), self.source) for group, at in BOTH]
        self.fetcher.begin(ConnectorPlan(fetch=blocks))

    def begin(self) -> None:
        self.sender.begin_stream(STREAMED, self.step)  # type: ignore[arg-type]

    def keep_all(self) -> None:
        """Keeps the blocks as the step after does: whole."""
        for group, at in BOTH:
            self.sender.slot(group, at)[:] = self.step.blocks[group][at]
        self.sender.begin(ConnectorPlan(keep=[SlotBlock(g, at, key_of(at)) for g, at in BOTH]))

    def check_bytes(self) -> None:
        for group, at in BOTH:
            assert (self.fetcher.slot(group, at) == self.step.blocks[group][at]).all()


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.sender.close()
    two.fetcher.close()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists what is sent from now on: a layer of some blocks as "group:layer", or a "block"."""
    found: list[str] = []
    whole, layer = BlockSender.send_block, BlockSender.send_layer

    def send_block(one, ask, name, data):
        found.append("block")
        whole(one, ask, name, data)

    def send_layer(one, ask, names, offset, data):
        found.append(f"{names[0].group}:{offset // LAYER_BYTES}")
        layer(one, ask, names, offset, data)

    monkeypatch.setattr(BlockSender, "send_block", send_block)
    monkeypatch.setattr(BlockSender, "send_layer", send_layer)
    return found


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        time.sleep(0.005)


def all_reports(worker: TransferWorker, num_names: int) -> ConnectorReport:
    """Waits for reports of `num_names` blocks that have come, or will not."""
    total, end = ConnectorReport(), time.monotonic() + WAIT_S
    while len(total.fetched) + len(total.not_fetched) < num_names:
        assert time.monotonic() < end, f"only {len(total.fetched)} blocks came"
        if (report := worker.report(wait_s=0.05)) is not None:
            total.fetched += report.fetched
            total.not_fetched += report.not_fetched
            total.kept += report.kept
    return total


def test_layers_leave_as_they_are_written(two: Two, sent: list[str]) -> None:
    """The first layers have come before the step ends, the last ones come after it, and no block is
    sent again when it is kept.
    """
    two.ask()
    time.sleep(0.3)
    two.begin()
    two.step.write(2)
    until(lambda: sent == ["0:0", "1:0"])
    two.step.write(4)
    until(lambda: sent == ["0:0", "1:0", "0:1", "1:1"])
    until(
        lambda: bool(
            (two.fetcher.slot(1, 0)[:LAYER_BYTES] == two.step.blocks[1, 0, :LAYER_BYTES]).all()
        )
    )
    assert two.fetcher.report(wait_s=0.0) is None
    two.step.write(6)
    two.sender.end_stream()
    assert set(all_reports(two.fetcher, len(BOTH)).fetched) == NAMES
    two.check_bytes()
    two.keep_all()
    until(lambda: two.sender.report(wait_s=0.05) is not None)
    assert sent == ["0:0", "1:0", "0:1", "1:1", "0:2", "1:2"]


def test_an_ask_that_comes_in_the_middle_gets_all_layers(two: Two, sent: list[str]) -> None:
    two.begin()
    two.step.write(4)
    until(lambda: two.step.num_read == 4)
    two.ask()
    until(lambda: len(sent) == 4)
    two.step.write(6)
    two.sender.end_stream()
    assert set(all_reports(two.fetcher, len(BOTH)).fetched) == NAMES
    two.check_bytes()


def test_a_step_that_fails_leaves_its_blocks_to_be_sent_whole(two: Two, sent: list[str]) -> None:
    """Bytes that have come already count once."""
    two.ask()
    time.sleep(0.3)
    two.begin()
    two.step.write(3)
    two.sender.end_stream()
    until(lambda: sorted(sent) == ["0:0", "0:1", "1:0"])
    two.keep_all()
    assert set(all_reports(two.fetcher, len(BOTH)).fetched) == NAMES
    two.check_bytes()
    assert sent.count("block") == len(BOTH)


def test_a_step_that_is_computed_again_is_not_read(two: Two) -> None:
    """The count of another step says nothing of these blocks."""
    two.ask()
    two.begin()
    two.step.written = (6, 6)
    two.sender.end_stream()
    assert two.step.num_read == 0
    two.sender.begin(ConnectorPlan(complete=sorted(NAMES)))
    assert set(all_reports(two.fetcher, len(BOTH)).not_fetched) == NAMES


def test_no_block_is_read_once_its_step_is_over(two: Two) -> None:
    two.begin()
    two.step.write(2)
    two.sender.end_stream()
    assert two.step.num_read == 2
    two.step.write(6)
    time.sleep(0.1)
    assert two.step.num_read == 2


def test_a_peer_that_fetches_only_sends_nothing(two: Two) -> None:
    assert two.sender.sends_layers and not two.fetcher.sends_layers
