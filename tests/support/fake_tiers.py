"""A connector's worker half with a dict for a disk: it does a few jobs behind the slots each time a
report is asked for.

A block's bytes are its tokens, as in `FakeExecutor`. Moves must not touch slots that are still read
or written.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from octavo.engine.kv.kv_connector import Tiers
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockKey,
    BlockMove,
    BlockPin,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
    StoredBytes,
)

BLOCK = 16
BLOCK_BYTES = 20 << 20
"""Bytes of a block, so large that a step may save one and load three."""
MAX_PINNED_BLOCKS = 10


class Disk(dict[BlockHashWithGroupId, tuple[BlockKey, tuple[int, ...]]]):
    """Blocks that outlive engines, the least recently used first."""

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.capacity = capacity
        self.pins: dict[BlockHashWithGroupId, float] = {}
        """Times until which blocks are pinned."""
        self.now = 0.0

    def has_room(self) -> bool:
        """Makes room for one block: the first that is not pinned goes. False where all are."""
        if len(self) >= self.capacity:
            oldest = next((name for name in self if self.pins.get(name, 0.0) <= self.now), None)
            if oldest is None:
                return False
            del self[oldest]
        return True


class FakeTiers:
    """Slots that hold tokens, with a disk behind them, or None."""

    def __init__(self, num_groups: int, disk: Disk | None, *, pace: int = 1) -> None:
        """`pace`: jobs done before each report."""
        self.slots: list[dict[tuple[int, int], int]] = [{} for _ in range(num_groups)]
        self.disk = disk
        self.pace = pace
        self.refuses = False
        """Whether the disk refuses writes, as a full one does."""
        self.jobs: deque[tuple[str, Any]] = deque()
        self._known: set[BlockHashWithGroupId] = set()
        self._report = ConnectorReport()

    def check(self, move: BlockMove) -> None:
        """Checks that a move touches no slot that is still read or written."""
        slot = move.target if move.kind == "save" else move.source
        for kind, what in self.jobs:
            if isinstance(what, SlotBlock) and (what.group, what.slot) == (move.group, slot):
                assert kind == "keep" and move.kind == "load", (
                    f"a slot to {kind} is moved: {move.kind}"
                )

    def begin(self, plan: ConnectorPlan | None) -> None:
        if plan is None:
            return
        assert self.disk is not None or not (plan.keep or plan.fetch)
        if plan.forget_all:
            self.jobs.append(("forget all", None))
        self.jobs += [("fetch", block) for block in plan.fetch]
        self.jobs += [("keep", block) for block in plan.keep]
        self.jobs += [("touch", name) for name in plan.touch]
        self.jobs += [("pin", pin) for pin in plan.pin]
        self.jobs += [("forget", name) for name in plan.forget]

    def report(self) -> ConnectorReport | None:
        for _ in range(self.pace):
            if self.jobs:
                self._do(*self.jobs.popleft())
        report, self._report = self._report, ConnectorReport()
        return report if report != ConnectorReport() else None

    def look(self) -> None:
        """Reports what others did to the disk."""
        if self.disk is not None:
            self._report.found += sorted(set(self.disk) - self._known)
            self._report.gone += sorted(self._known - set(self.disk))
            self._report.pinned += [
                BlockPin(*pin)
                for pin in self.disk.pins.items()
                if pin[0] in self.disk and pin[1] > self.disk.now
            ]
            self._known = set(self.disk)

    def _do(self, kind: str, what: Any) -> None:
        assert self.disk is not None
        if kind == "fetch":
            self._fetch(self.disk, what)
        elif kind == "keep":
            self._keep(self.disk, what)
        elif kind == "touch":
            if what in self.disk:
                self.disk[what] = self.disk.pop(what)
        elif kind == "pin":
            self.disk.pins[what.name] = what.until
        elif kind == "forget":
            self.disk.pop(what, None)
            self._known.discard(what)
        else:
            self.disk.clear()
            self.disk.pins.clear()
            self._known.clear()

    def _fetch(self, disk: Disk, block: SlotBlock) -> None:
        key, tokens = disk.get(block.name, (None, ()))
        for offset, token in enumerate(tokens):
            self.slots[block.group][block.slot, offset] = token
        if key != block.key:
            disk.pop(block.name, None)
        (self._report.fetched if key == block.key else self._report.not_fetched).append(block.name)

    def _keep(self, disk: Disk, block: SlotBlock) -> None:
        before = set(disk)
        keeps = not self.refuses and disk.has_room()
        if keeps:
            tokens = tuple(self.slots[block.group][block.slot, offset] for offset in range(BLOCK))
            assert tokens == block.key.token_ids, "what is kept is not what it is called"
            disk[block.name] = (block.key, tokens)
            self._known.add(block.name)
        gone = before - set(disk)
        self._known -= gone
        self._report.gone += sorted(gone)
        (self._report.kept if keeps else self._report.not_kept).append(block.name)
        self._report.stored = StoredBytes(len(disk) * BLOCK_BYTES)


def tiers_of(num_groups: int, tiers: FakeTiers, num_slots: int) -> Tiers:
    """Returns the sizes from which a connector is made that knows what is on the disk."""
    tiers.look()
    return Tiers(
        [BLOCK_BYTES] * num_groups,
        num_slots,
        keeps=tiers.disk is not None,
        max_pinned_bytes=MAX_PINNED_BLOCKS * BLOCK_BYTES,
        first=tiers.report(),
    )
