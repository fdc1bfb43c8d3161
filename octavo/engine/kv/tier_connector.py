"""The scheduler half of the prefix cache's lower tiers: slots of host memory, and what lies behind
them, files on disk.

Knows names, slots and what is on its way; no byte, no file, no clock. What it decides leaves as
moves and as a ConnectorPlan; what became of it comes back as a ConnectorReport. Implements
`ports.Connector`; its worker half is `worker/connectors/tiers.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from octavo.engine.kv.tier_slots import ConnectorSlots, Slot
from octavo.errors import InvalidRequest
from octavo.step import (
    BlockKey,
    BlockMove,
    BlockName,
    BlockPin,
    ConnectorPlan,
    ConnectorReport,
    ConnectorStats,
    SlotBlock,
)

SAVED_BYTES_PER_STEP = 16 << 20
"""Of copies from the device; at 8 GB/s 2 ms. What is left waits for the next step."""

LOADED_BYTES_PER_STEP = 64 << 20
"""Of copies to the device while others compute: 8 ms."""

MAX_UNSAVED = 1 << 16
"""Blocks that wait to be saved; what comes on top is not."""


class Tiers(msgspec.Struct):
    """`num_slots` slots for each cache group, of whose blocks `block_bytes` are the sizes; without
    slots there is nothing.
    """

    block_bytes: list[int]
    num_slots: int
    keeps: bool = False
    """There is something behind the slots."""
    max_pinned_bytes: int = 0
    first: ConnectorReport | None = None
    """What is there at the start."""


@dataclass(slots=True)
class Sent:
    """With one step, whose result has not come: blocks that it saves, and what goes with it."""

    saving: dict[BlockName, Slot] = field(default_factory=dict)
    plan: ConnectorPlan = field(default_factory=ConnectorPlan)


class TierConnector:
    def __init__(self, tiers: Tiers) -> None:
        self.keeps = tiers.keeps
        self.max_pinned_bytes = tiers.max_pinned_bytes
        self.stats = ConnectorStats(tiers.num_slots)
        self._block_bytes = tiers.block_bytes
        self._slots = [ConnectorSlots(tiers.num_slots) for _ in tiers.block_bytes]
        self._behind: set[BlockName] = set()
        self._unsaved: dict[BlockName, BlockKey] = {}
        """Named on the device, in the order of their naming."""
        self._fetching: dict[BlockName, Slot] = {}
        self._keeping: dict[BlockName, Slot] = {}
        self._pins: dict[BlockName, float] = {}
        """Until when each is kept, wherever it is now."""
        self._held: dict[str, list[tuple[int, Slot]]] = {}
        """By requests that wait, or have waited and not yet started: (group, slot)."""
        self._plan = ConnectorPlan()
        self._sent: deque[Sent] = deque()
        """The steps that are under way, in their order."""
        self._load_budget = LOADED_BYTES_PER_STEP
        if tiers.first is not None:
            self.take(tiers.first)

    @property
    def reaches(self) -> bool:
        """There is anything to be asked."""
        return self.stats.num_slots > 0

    @property
    def has_work(self) -> bool:
        """Something to be sent with a step, or to be told by one."""
        return bool(self._unsaved or self._keeping or _is_any(self._plan))

    # -- what is there -----------------------------------------------------------------------------

    def has(self, group: int, key: BlockKey) -> bool:
        """It can be loaded by the very next step."""
        slot = self._slots[group].find(key)
        return slot is not None and slot.ready

    def can_fetch(self, group: int, key: BlockKey) -> bool:
        """It is on its way into a slot, or can be brought there."""
        name = BlockName(group, key.digest)
        if self._slots[group].find(key) is not None:
            return True
        return (
            name in self._behind
            and name not in self._fetching
            and not self._slots[group].has_name(key)
        )

    # -- a request wants blocks --------------------------------------------------------------------

    def fetch(self, request_id: str, wanted: Iterable[tuple[int, BlockKey]]) -> bool:
        """Brings as many of these blocks, from the first on, as there are slots for, and holds them
        for the request.

        False, and nothing held, where nothing has to be waited for.
        """
        held: list[tuple[int, Slot]] = []
        for group, key in wanted:
            slot = self._slots[group].find(key) or self._begin_fetch(group, key)
            if slot is None:
                break
            self._slots[group].hold(slot)
            held.append((group, slot))
        self._held[request_id] = held
        if self.is_waiting(request_id):
            return True
        self.release(request_id)
        return False

    def _begin_fetch(self, group: int, key: BlockKey) -> Slot | None:
        slot = self._slots[group].claim(key) if self.can_fetch(group, key) else None
        if slot is not None:
            block = SlotBlock(group, slot.index, key)
            self._plan.fetch.append(block)
            self._fetching[block.name] = slot
        return slot

    def has_fetched(self, request_id: str) -> bool:
        return request_id in self._held

    def is_waiting(self, request_id: str) -> bool:
        """Some of what it fetched is not there yet."""
        return any(slot.is_awaited for _, slot in self._held.get(request_id, ()))

    def release(self, request_id: str) -> None:
        """It has started, or ended."""
        for group, slot in self._held.pop(request_id, ()):
            self._slots[group].release(slot)

    def may_load(self, places: Sequence[tuple[int, int]]) -> bool:
        """Whether this step may still load blocks at these places, (group, index), while others
        compute.
        """
        return sum(self._block_bytes[group] for group, _ in places) <= self._load_budget

    def load(self, group: int, key: BlockKey, block_id: int) -> BlockMove:
        """Of a block that is there."""
        slot = self._slots[group].find(key)
        assert slot is not None and slot.ready
        self._slots[group].hold(slot)
        self._slots[group].release(slot)
        self._load_budget -= self._block_bytes[group]
        self.stats.num_loaded += 1
        return BlockMove(group, slot.index, block_id, "load")

    def touch(self, group: int, keys: Iterable[BlockKey]) -> None:
        """These were found and used, on the device or here."""
        if self.keeps:
            self._plan.touch += [
                name for key in keys if (name := BlockName(group, key.digest)) in self._behind
            ]

    # -- blocks are named --------------------------------------------------------------------------

    def offer(self, group: int, key: BlockKey) -> None:
        """A block of that name was just filled on the device."""
        if self.stats.num_slots and len(self._unsaved) < MAX_UNSAVED:
            self._unsaved[BlockName(group, key.digest)] = key

    def forget(self, group: int, keys: Iterable[BlockKey]) -> None:
        """What they hold is not to be found again."""
        for key in keys:
            name = BlockName(group, key.digest)
            self._unsaved.pop(name, None)
            slot = self._slots[group].find(key)
            if slot is not None:
                self._slots[group].drop(slot)
            if name in self._behind or name in self._keeping:
                self._behind.discard(name)
                self._plan.forget.append(name)

    def reset(self) -> None:
        """Forgets all, here and behind."""
        for slots in self._slots:
            for slot in slots:
                slots.drop(slot)
        self._unsaved.clear()
        self._behind.clear()
        self._pins.clear()
        self._plan = ConnectorPlan(fetch=self._plan.fetch, forget_all=self.keeps)

    def knows(self, name: BlockName) -> bool:
        """It is kept behind the slots, or will be."""
        return name in self._behind or name in self._keeping or name in self._unsaved

    def pin(self, names: Sequence[BlockName], *, until: float, now: float) -> None:
        """Keeps them until then (seconds since 1970); InvalidRequest where that is more than may be
        pinned.
        """
        pins = {name: end for name, end in self._pins.items() if end > now}
        if until > now:
            self._check_pins(names, [name for name in pins if name not in set(names)])
        pins |= dict.fromkeys(names, until)
        self._pins = {name: end for name, end in pins.items() if end > now}
        self._plan.pin += [BlockPin(name, until) for name in names]

    def _check_pins(self, names: Sequence[BlockName], others: Sequence[BlockName]) -> None:
        num_bytes, pinned_bytes = (
            sum(self._block_bytes[name.group] for name in some) for some in (names, others)
        )
        pinned_bytes += self.stats.stored.foreign_pinned_bytes
        if num_bytes + pinned_bytes > self.max_pinned_bytes:
            got = f"the prompt's blocks have {num_bytes:,} bytes, and {pinned_bytes:,} are pinned"
            raise InvalidRequest(
                f"{got}; allowed are {self.max_pinned_bytes:,}",
                hint="raise prefix_cache_size, or unpin something",
            )

    # -- steps -------------------------------------------------------------------------------------

    def begin_step(self, find: Callable[[int, BlockKey], int | None]) -> list[BlockMove]:
        """Moves that come before all others of the step; `find` says which block of the device has
        that name.
        """
        self._load_budget = LOADED_BYTES_PER_STEP
        self._sent.append(Sent())
        moves: list[BlockMove] = []
        num_bytes = 0
        while self._unsaved and num_bytes < SAVED_BYTES_PER_STEP:
            name, key = next(iter(self._unsaved.items()))
            if name in self._keeping:  # and was forgotten since
                break
            block_id = find(name.group, key)
            if (
                block_id is not None
                and name not in self._behind
                and not self._slots[name.group].has_name(key)
            ):
                slot = self._slots[name.group].claim(key)
                if slot is None:
                    break
                moves.append(BlockMove(name.group, block_id, slot.index, "save"))
                self._begin_save(name, slot)
                num_bytes += self._block_bytes[name.group]
            del self._unsaved[name]
        return moves

    def _begin_save(self, name: BlockName, slot: Slot) -> None:
        self._sent[-1].saving[name] = slot
        if self.keeps:
            self._slots[name.group].hold(slot)
            self._keeping[name] = slot
            self._plan.keep.append(SlotBlock(name.group, slot.index, slot.key))
            if name in self._pins:  # and was lost
                self._plan.pin.append(BlockPin(name, self._pins[name]))

    def end_step(self) -> ConnectorPlan | None:
        """What goes with the step, after its moves."""
        sent, self._plan = self._plan, ConnectorPlan()
        self._sent[-1].plan = sent
        return sent if _is_any(sent) else None

    def step_done(self, report: ConnectorReport | None) -> None:
        """The oldest."""
        saving = self._sent.popleft().saving
        self.stats.num_saved += len(saving)
        for name, slot in saving.items():
            slot.ready = True
            self._slots[name.group].release(slot)
        if report is not None:
            self.take(report)

    def step_failed(self) -> None:
        """Nothing of it was begun behind the slots, and nobody knows which moves were made."""
        saving, sent = self._sent[0].saving, self._sent[0].plan
        for name in list(saving):
            self._end(saving, name, ready=False)
        for block in sent.keep:
            self._end(self._keeping, block.name, ready=False)
        for block in sent.fetch:
            self._end(self._fetching, block.name, ready=False)
        self._plan.pin = sent.pin + self._plan.pin
        self._plan.forget += sent.forget
        self._plan.forget_all = sent.forget_all

    def take(self, report: ConnectorReport) -> None:
        self._behind.update(report.found)
        self._pins.update(report.pinned)
        self._behind.difference_update(chain(report.gone, report.not_fetched))
        for name in report.late:
            self._fetching[name].is_late = True
        for name in report.fetched:
            self._end(self._fetching, name, ready=True)
        for name in report.not_fetched:
            self._end(self._fetching, name, ready=False)
        for name in report.kept:
            if not self._keeping[name].dropped:
                self._behind.add(name)
        for name in chain(report.kept, report.not_kept):
            self._slots[name.group].release(self._keeping.pop(name))
        self._count(report)

    def _end(self, under_way: dict[BlockName, Slot], name: BlockName, *, ready: bool) -> None:
        slot = under_way.pop(name)
        slot.ready = ready
        if not ready:
            self._slots[name.group].drop(slot)
        self._slots[name.group].release(slot)

    def _count(self, report: ConnectorReport) -> None:
        stats = self.stats
        stats.num_fetched += len(report.fetched)
        stats.num_not_fetched += len(report.not_fetched)
        stats.num_kept += len(report.kept)
        stats.num_not_kept += len(report.not_kept)
        stats.stored = report.stored or stats.stored

    def snapshot(self) -> ConnectorStats:
        self.stats.num_used_slots = sum(map(len, self._slots))
        self.stats.num_stored_blocks = len(self._behind)
        return msgspec.structs.replace(self.stats)


def no_connector(num_groups: int) -> TierConnector:
    return TierConnector(Tiers([0] * num_groups, 0))


def _is_any(plan: ConnectorPlan) -> bool:
    return any(getattr(plan, name) for name in plan.__struct_fields__)
