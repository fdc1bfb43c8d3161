"""A connector's worker half with a dict for a disk: what goes on behind the slots is done a job at a time, whenever a report is asked for.

As `FakeExecutor` has it, a block is its tokens; slots that are still read or written must not be touched by moves.
"""

from __future__ import annotations

from collections import deque

from octavo.engine.connector import Tiers
from octavo.step import BlockKey, BlockMove, BlockName, ConnectorPlan, ConnectorReport, SlotBlock, StoredBytes

BLOCK = 16
BLOCK_BYTES = 20 << 20
"""So large that a step may save one and load three."""

Disk = dict[BlockName, tuple[BlockKey, tuple[int, ...]]]


class FakeTiers:
    """`pace`: jobs done before each report. A disk of None: there is nothing behind the slots."""

    def __init__(self, num_groups: int, disk: Disk | None, *, pace: int = 1) -> None:
        self.slots: list[dict[tuple[int, int], int]] = [{} for _ in range(num_groups)]
        self.disk = disk
        self.pace = pace
        self.refuses = False
        """The disk is full."""
        self.until: dict[BlockName, float] = {}
        self._jobs: deque[tuple[str, SlotBlock | BlockName | None]] = deque()
        self._known: set[BlockName] = set()
        self._report = ConnectorReport()

    def check(self, move: BlockMove) -> None:
        """Before a move into a slot or out of it."""
        slot = move.target if move.kind == "save" else move.source
        for kind, what in self._jobs:
            if isinstance(what, SlotBlock) and (what.group, what.slot) == (move.group, slot):
                assert kind == "keep" and move.kind == "load", f"a slot to {kind} is moved: {move.kind}"

    def begin(self, plan: ConnectorPlan | None) -> None:
        if plan is None:
            return
        assert self.disk is not None or not (plan.keep or plan.fetch)
        if plan.forget_all:
            self._jobs.append(("forget all", None))
        self._jobs += [("fetch", block) for block in plan.fetch]
        self._jobs += [("keep", block) for block in plan.keep]
        self._jobs += [("forget", name) for name in plan.forget]
        self.until.update(plan.pin)

    def report(self) -> ConnectorReport | None:
        for _ in range(self.pace):
            if self._jobs:
                self._do(*self._jobs.popleft())
        report, self._report = self._report, ConnectorReport()
        return report if report != ConnectorReport() else None

    def look(self) -> None:
        """What others did to the disk becomes known."""
        if self.disk is not None:
            self._report.found += sorted(set(self.disk) - self._known)
            self._report.gone += sorted(self._known - set(self.disk))
            self._known = set(self.disk)

    def _do(self, kind: str, what: SlotBlock | BlockName | None) -> None:
        assert self.disk is not None
        if kind == "fetch":
            assert isinstance(what, SlotBlock)
            key, tokens = self.disk.get(what.name, (None, ()))
            for offset, token in enumerate(tokens):
                self.slots[what.group][what.slot, offset] = token
            (self._report.fetched if key == what.key else self._report.not_fetched).append(what.name)
        elif kind == "keep":
            assert isinstance(what, SlotBlock)
            if not self.refuses:
                tokens = tuple(self.slots[what.group][what.slot, offset] for offset in range(BLOCK))
                assert tokens == what.key.token_ids, "what is kept is not what it is called"
                self.disk[what.name] = (what.key, tokens)
                self._known.add(what.name)
            (self._report.not_kept if self.refuses else self._report.kept).append(what.name)
            self._report.stored = StoredBytes(len(self.disk) * BLOCK_BYTES)
        elif kind == "forget":
            assert isinstance(what, BlockName)
            self.disk.pop(what, None)
            self._known.discard(what)
        else:
            self.disk.clear()
            self._known.clear()


def tiers_of(num_groups: int, tiers: FakeTiers, num_slots: int) -> Tiers:
    """What a connector is made of that knows what is on the disk."""
    tiers.look()
    return Tiers([BLOCK_BYTES] * num_groups, num_slots, tiers.disk is not None, 10 * BLOCK_BYTES, tiers.report())
