"""Moves KV blocks according to a plan: on the device, to and from host memory, and to and from a
connector's slots.

Owns a worker's KV memory on the device, and host memory for swapped requests; the connector owns
its slots. Only kernels read the contents of blocks; the BlockManager decides which request has
which block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.kv_messages import BlockMove
from octavo.engine.protocol.ports import ConnectorWorker
from octavo.executor.kv import BatchedKvCache, BlockMover, KvCache
from octavo.worker.block_map import VirtualBlockMap


@dataclass(frozen=True, slots=True)
class HostShape:
    """Sizes of one cache group's blocks in host memory."""

    num_blocks: int
    block_bytes: int


class SingleBlockMover:
    """Copies blocks of a KvCache synchronously, one by one. Implements `kv.BlockMover`."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._kv.copy_block(group, source, target)

    def read(self, group: int, block_ids: Sequence[int], into: Sequence[NDArray[np.uint8]]) -> None:
        for block_id, memory in zip(block_ids, into, strict=True):
            self._kv.read_block(group, block_id, memory)

    def write(
        self, group: int, block_ids: Sequence[int], data: Sequence[NDArray[np.uint8]]
    ) -> None:
        for block_id, memory in zip(block_ids, data, strict=True):
            self._kv.write_block(group, block_id, memory)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Does nothing: pinned memory has no advantage here."""

    def settle(self) -> float:
        return 0.0


def batches(moves: Sequence[BlockMove]) -> Iterator[list[BlockMove]]:
    """Yields runs of moves of one kind and group, in order. A block that a copy writes is read only
    by a later batch.
    """
    batch: list[BlockMove] = []
    targets: set[int] = set()
    for move in moves:
        follows = batch and (move.kind, move.group) == (batch[0].kind, batch[0].group)
        # Only a copy on the device can read a block that an earlier move of its kind has written.
        if not follows or (move.kind == "copy" and targets & {move.source, move.target}):
            if batch:
                yield batch
            batch, targets = [], set()
        batch.append(move)
        targets.add(move.target)
    if batch:
        yield batch


class CacheEngine:
    """KV memory of a worker: on the device, and on the host for swapped requests."""

    def __init__(
        self,
        kv: KvCache,
        host: Sequence[HostShape] = (),
        connector: ConnectorWorker | None = None,
        block_map: VirtualBlockMap | None = None,
        counters: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """`host`: sizes by group; memory that is never written is not allocated. `block_map`: maps
        block ids to indices in `kv` in the virtual layout; None: the index is the block id.
        `counters`: counters of extensions for `kv`.
        """
        self.kv = kv
        self.connector = connector
        self.block_map = block_map
        self.counters = counters
        """Returns the counters of extensions for the KV memory; None if there are none."""
        self._mover: BlockMover = (
            kv.copies if isinstance(kv, BatchedKvCache) else SingleBlockMover(kv)
        )
        self._host = [np.empty((shape.num_blocks, shape.block_bytes), np.uint8) for shape in host]
        """Host memory by group, `[blocks, bytes of a block in all layers]`."""
        for memory in self._host:
            self._mover.pin(memory)

    def apply(self, moves: Sequence[BlockMove]) -> None:
        """Performs moves in the plan's order, before the step is computed."""
        find = self._find
        for batch in batches(moves):
            group, kind = batch[0].group, batch[0].kind
            if kind == "copy":
                self._mover.copy(
                    group, [(find(group, move.source), find(group, move.target)) for move in batch]
                )
            elif kind in ("swap_out", "save"):
                into = [self._off_device(move, move.target) for move in batch]
                self._mover.read(group, [find(group, move.source) for move in batch], into)
            else:
                data = [self._off_device(move, move.source) for move in batch]
                self._mover.write(group, [find(group, move.target) for move in batch], data)

    def _find(self, group: int, block_id: int) -> int:
        return block_id if self.block_map is None else self.block_map.find(group, block_id)

    def settle(self, moves: Sequence[BlockMove]) -> float:
        """Waits until the blocks that these moves read from the device are on the host. Returns the
        seconds spent copying, 0 if not measured.
        """
        return 0.0 if all(move.kind == "copy" for move in moves) else self._mover.settle()

    def _off_device(self, move: BlockMove, index: int) -> NDArray[np.uint8]:
        """Returns the host memory of a move, `[block_bytes]`."""
        if move.kind in ("swap_out", "swap_in"):
            host: NDArray[np.uint8] = self._host[move.group][index]
            return host
        assert self.connector is not None, "without a connector nothing is saved"
        slot: NDArray[np.uint8] = self.connector.slot(move.group, index)
        return slot
