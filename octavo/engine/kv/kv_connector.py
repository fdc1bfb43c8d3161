"""Scheduler half of the KV connector: slots of host memory and the files behind them, as lower
tiers of the prefix cache.

Tracks block hashes, slots and pending transfers without access to bytes, files or a clock. Its
decisions are sent as moves and a ConnectorPlan; the outcome is returned as a ConnectorReport. The
worker half is `worker/kv_connectors/tiers.py`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec

from octavo.api.errors import InvalidRequest
from octavo.engine.kv.tier_slots import Slot, TierSlots
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockKey,
    BlockMove,
    BlockPin,
    BlockQuery,
    ConnectorPlan,
    ConnectorReport,
    ConnectorStats,
    SlotBlock,
    StreamedBlock,
)

SAVED_BYTES_PER_STEP = 16 << 20
"""Bytes that a step copies from the device while no other engine waits for them: 2 ms at 8 GB/s."""

SENT_BYTES_PER_STEP = 128 << 20
"""Maximum bytes that a step copies from the device if other engines wait for them: 16 ms."""

LOADED_BYTES_PER_STEP = 64 << 20
"""Maximum bytes that a step copies to the device while other requests compute: 8 ms."""

MAX_RATED = 1 << 16
"""Maximum number of blocks whose ratings are kept."""

MAX_UNSAVED = 1 << 16
"""Maximum number of blocks that wait to be saved; further ones are not saved."""

EMPTY_PLAN = ConnectorPlan()


class BlockChoiceSpec(NamedTuple):
    """How stored blocks are selected by their ratings."""

    group: int
    """Cache group whose blocks are rated."""
    share: float
    """Fraction of a stored prefix that a prompt loads."""


class Tiers(msgspec.Struct):
    """Sizes and properties of the tiers; with `num_slots` 0 there are none."""

    block_bytes: list[int]
    """Bytes of a block, by cache group."""
    num_slots: int
    """Slots of each cache group."""
    keeps: bool = False
    """Whether there is a store behind the slots: files, a pool or other engines."""
    max_pinned_bytes: int = 0
    saved_bytes_per_step: int = SAVED_BYTES_PER_STEP
    """Maximum bytes that one step copies from the device; later steps copy the rest."""
    first: ConnectorReport | None = None
    """Report of the blocks that are stored at the start."""
    asks: bool = False
    """Whether the store must be queried to learn which blocks it has."""
    streams: bool = False
    """Whether a block's layers may be sent while the step that fills it computes."""
    choice: BlockChoiceSpec | None = msgspec.field(default=None, name="weighing")
    """How a request's stored blocks are selected; None: requests load all of them."""


@dataclass(slots=True)
class ConnectorStep:
    """Saves and plan of a step whose result is outstanding."""

    saving: dict[BlockHashWithGroupId, Slot] = field(default_factory=dict)
    """Blocks that the step's moves copy into slots."""
    plan: ConnectorPlan = field(default_factory=ConnectorPlan)


class KVConnector:
    """Decides which hashed blocks are saved to host memory and files, and which are loaded back."""

    def __init__(self, tiers: Tiers) -> None:
        self.keeps = tiers.keeps
        self._asks = tiers.asks
        self.streams = tiers.streams
        self.max_pinned_bytes = tiers.max_pinned_bytes
        self.stats = ConnectorStats(tiers.num_slots)
        self.block_bytes = tiers.block_bytes
        self._saved_bytes_per_step = tiers.saved_bytes_per_step
        self.slots = [TierSlots(tiers.num_slots) for _ in tiers.block_bytes]
        self._behind: set[BlockHashWithGroupId] = set()
        """Blocks stored behind the slots."""
        self._unsaved: dict[BlockHashWithGroupId, BlockKey] = {}
        """Blocks on the device that wait to be saved, in the order in which they were hashed."""
        self.fetching: dict[BlockHashWithGroupId, Slot] = {}
        """Blocks being read from the store into their slots."""
        self.keeping: dict[BlockHashWithGroupId, Slot] = {}
        """Blocks being written from their slots to the store."""
        self.pins: dict[BlockHashWithGroupId, float] = {}
        """Expiry time of each pinned block, in seconds since 1970, wherever the block is stored."""
        self.held: dict[str, list[tuple[int, Slot]]] = {}
        """(group, slot) of the blocks held for each request that waits or is about to start."""
        self._asked: dict[str, list[Slot]] = {}
        """Slots that the worker half reads for each request's unfinished query."""
        self._answers: dict[str, list[float] | None] = {}
        """Unread replies to queries, by request; None before the reply has arrived."""
        self._ratings: OrderedDict[bytes, float] = OrderedDict()
        """Rating of each block by digest; the most recently rated one is last."""
        self._choice = tiers.choice
        self._completed: list[BlockHashWithGroupId] = []
        """Blocks of finished prompts that other engines wait for, kept until all of them that are
        on the device are saved.
        """
        self._plan = ConnectorPlan()
        """Plan for the next step."""
        self.under_way: deque[ConnectorStep] = deque()
        """Steps whose results are outstanding, oldest first."""
        self._load_budget = LOADED_BYTES_PER_STEP
        if tiers.first is not None:
            self.process_report(tiers.first)

    @property
    def has_work(self) -> bool:
        """Whether the connector needs a step even if no request runs, to send a plan or to receive
        a report.
        """
        moving = self._unsaved or self.keeping or self.fetching
        return bool(moving or self._completed or self._plan != EMPTY_PLAN)

    # -- state of blocks ---------------------------------------------------------------------------

    def has(self, group: int, key: BlockKey) -> bool:
        """Returns whether the next step can load the block."""
        slot = self.slots[group].find(key)
        return slot is not None and slot.ready

    def can_fetch(self, group: int, key: BlockKey, source: str = "") -> bool:
        """Returns whether the block can be fetched: it is in a slot, being fetched, in the store,
        computed by the engine at `source`, or possibly in a remote store.
        """
        name = BlockHashWithGroupId(group, key.digest)
        if self.slots[group].find(key) is not None:
            return True
        return (
            bool(source or self._asks or name in self._behind)
            and name not in self.fetching
            and not self.slots[group].has_name(key)
        )

    # -- fetching blocks for a request -------------------------------------------------------------

    def fetch(
        self, request_id: str, blocks: Iterable[tuple[int, BlockKey]], source: str = ""
    ) -> bool:
        """Fetches as many of `blocks` as there are free slots, in order, and holds them for the
        request.

        Returns False and holds nothing if the request need not wait.
        """
        held: list[tuple[int, Slot]] = []
        for group, key in blocks:
            slot = self.slots[group].find(key) or self._begin_fetch(group, key, source)
            if slot is None:
                break
            self.slots[group].hold(slot)
            held.append((group, slot))
        self.held[request_id] = held
        if self.is_waiting(request_id):
            return True
        self.release(request_id)
        return False

    def _begin_fetch(self, group: int, key: BlockKey, source: str) -> Slot | None:
        slot = self.slots[group].claim(key) if self.can_fetch(group, key, source) else None
        if slot is not None:
            slot.rating = self._ratings.get(key.digest, 0.0)
            is_own = BlockHashWithGroupId(group, key.digest) in self._behind
            block = SlotBlock(group, slot.index, key, "" if is_own else source)
            self._plan.fetch.append(block)
            self.fetching[block.name] = slot
        return slot

    def is_waiting(self, request_id: str) -> bool:
        """Returns whether a request must wait for blocks that have not arrived yet."""
        return any(slot.is_awaited for _, slot in self.held.get(request_id, ()))

    def release(self, request_id: str) -> None:
        """Releases the blocks held for a request that has started or ended."""
        for group, slot in self.held.pop(request_id, ()):
            self.slots[group].release(slot)
            name = BlockHashWithGroupId(group, slot.key.digest)
            if slot.num_holds == 1 and self.fetching.get(name) is slot:
                self._plan.cancel.append(name)  # only the fetch itself still holds the slot

    # -- ratings of blocks -------------------------------------------------------------------------

    def ask(self, query: BlockQuery, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Asks the worker half to rate the blocks that are in slots or being fetched, and holds
        these until it has replied; returns their keys.
        """
        slots = self.slots[query.group]
        near = [
            (key, slot)
            for key in keys
            if (slot := slots.find(key)) is not None and (slot.ready or slot.is_awaited)
        ]
        if not near or query.request_id in self._asked:  # a cancelled query is still running
            return []
        for _, slot in near:
            slots.hold(slot)
        self._asked[query.request_id] = [slot for _, slot in near]
        self._answers[query.request_id] = None
        query = msgspec.structs.replace(query, slots=[slot.index for _, slot in near])
        self._plan.queries.append(query)
        return [key for key, _ in near]

    def pop_ratings(self, request_id: str) -> list[float] | None:
        """Removes and returns the requested ratings. Returns None until they have arrived."""
        ratings = self._answers.get(request_id)
        if ratings is not None:
            del self._answers[request_id]
        return ratings

    def cancel_query(self, request_id: str) -> None:
        """Discards the reply to a request's query."""
        self._answers.pop(request_id, None)

    def rate(self, keys: Sequence[BlockKey], ratings: Sequence[float]) -> None:
        """Updates ratings: the new ones, scaled so that their mean is 1, plus half of the earlier
        ones.
        """
        for key, rating in zip(keys, ratings, strict=True):
            earlier = self._ratings.pop(key.digest, 0.0)
            self._ratings[key.digest] = total = rating * len(ratings) + earlier / 2
            for slots in self.slots:
                slot = slots.find(key)
                if slot is not None:
                    slot.rating = total
        while len(self._ratings) > MAX_RATED:
            self._ratings.popitem(last=False)

    def _end_query(self, request_id: str, ratings: list[float], group: int) -> None:
        """Releases the blocks of a query and stores its ratings; stores [] if a block has not
        arrived or was dropped.
        """
        asked = self._asked.pop(request_id, [])
        has_all = all(slot.ready and not slot.dropped for slot in asked)
        for slot in asked:
            self.slots[group].release(slot)
        if request_id in self._answers:
            self._answers[request_id] = ratings if has_all else []

    # -- loading blocks when a request starts ------------------------------------------------------

    def may_load(self, blocks: Sequence[tuple[int, int]]) -> bool:
        """Returns whether this step may still load the blocks (group, index) while other requests
        compute.
        """
        return sum(self.block_bytes[group] for group, _ in blocks) <= self._load_budget

    def load(self, group: int, key: BlockKey, block_id: int) -> BlockMove:
        """Returns the move that loads a block from its slot."""
        slot = self.slots[group].find(key)
        assert slot is not None and slot.ready
        self.slots[group].hold(slot)
        self.slots[group].release(slot)
        self._load_budget -= self.block_bytes[group]
        self.stats.num_loaded += 1
        return BlockMove(group, slot.index, block_id, "load")

    def touch(self, group: int, keys: Iterable[BlockKey]) -> None:
        """Marks blocks that a request used, on the device or in slots, so that the store evicts
        them last.
        """
        if self.keeps:
            self._plan.touch += [
                name
                for key in keys
                if (name := BlockHashWithGroupId(group, key.digest)) in self._behind
            ]

    # -- saving blocks -----------------------------------------------------------------------------

    def offer(self, group: int, key: BlockKey) -> None:
        """Queues a block to be saved, right after it was filled on the device."""
        if self.stats.num_slots and len(self._unsaved) < MAX_UNSAVED:
            self._unsaved[BlockHashWithGroupId(group, key.digest)] = key

    def stream(self, block: StreamedBlock) -> None:
        """Sends the layers of a block that the next step fills to other engines while that step
        computes.
        """
        self._plan.stream.append(block)

    def complete(self, names: Iterable[BlockHashWithGroupId]) -> None:
        """Records the blocks of a finished prompt that was computed for another engine."""
        if self.keeps:
            self._completed += names

    def discard(self, group: int, keys: Iterable[BlockKey]) -> None:
        """Removes blocks from slots and from the store."""
        for key in keys:
            name = BlockHashWithGroupId(group, key.digest)
            self._unsaved.pop(name, None)
            slot = self.slots[group].find(key)
            if slot is not None:
                self.slots[group].drop(slot)
            if name in self._behind or name in self.keeping:
                self._behind.discard(name)
                self._plan.forget.append(name)

    def reset(self) -> None:
        """Removes all blocks, in slots and in the store."""
        for slots in self.slots:
            for slot in slots:
                slots.drop(slot)
        self._unsaved.clear()
        self._behind.clear()
        self.pins.clear()
        self._plan = ConnectorPlan(fetch=self._plan.fetch, forget_all=self.keeps)

    def is_stored(self, name: BlockHashWithGroupId) -> bool:
        return name in self._behind

    def knows(self, name: BlockHashWithGroupId) -> bool:
        """Returns whether the block is in the store, or is being written to it."""
        return name in self._behind or name in self.keeping or name in self._unsaved

    def pin(self, names: Sequence[BlockHashWithGroupId], *, until: float, now: float) -> None:
        """Pins blocks until a time, in seconds since 1970. Raises InvalidRequest if the limit on
        pinned blocks would be exceeded.
        """
        pins = {name: end for name, end in self.pins.items() if end > now}
        if until > now:
            self._check_pins(names, [name for name in pins if name not in set(names)])
        pins |= dict.fromkeys(names, until)
        self.pins = {name: end for name, end in pins.items() if end > now}
        self._plan.pin += [BlockPin(name, until) for name in names]

    def _check_pins(
        self, names: Sequence[BlockHashWithGroupId], others: Sequence[BlockHashWithGroupId]
    ) -> None:
        num_bytes = sum(self.block_bytes[name.group] for name in names)
        pinned_bytes = sum(self.block_bytes[name.group] for name in others)
        pinned_bytes += self.stats.stored.foreign_pinned_bytes
        if num_bytes + pinned_bytes > self.max_pinned_bytes:
            got = f"the prompt's blocks have {num_bytes:,} bytes, and {pinned_bytes:,} are pinned"
            raise InvalidRequest(
                f"{got}; expected at most {self.max_pinned_bytes:,}",
                hint="raise prefix_cache_size, or unpin another prompt",
            )

    # -- steps -------------------------------------------------------------------------------------

    def begin_step(self, find: Callable[[int, BlockKey], int | None]) -> list[BlockMove]:
        """Begins a step; returns the moves that save blocks, which the worker makes before all
        others.

        `find` returns the device block with a given key.
        """
        self._load_budget = LOADED_BYTES_PER_STEP
        self.under_way.append(ConnectorStep())
        moves: list[BlockMove] = []
        num_bytes = 0
        while self._unsaved and num_bytes < self._saved_bytes_per_step:
            name, key = next(iter(self._unsaved.items()))
            if name in self.keeping:
                break  # removed and hashed again while being written: the old slot is still in use
            block_id = find(name.group, key)
            is_new = name not in self._behind
            if is_new and (slot := self._whole_slot(name.group, key)) is not None:
                self._begin_keep(name, slot)  # its file is gone, but its slot still has it
            elif block_id is not None and is_new and not self.slots[name.group].has_name(key):
                slot = self.slots[name.group].claim(key)
                if slot is None:
                    break
                moves.append(BlockMove(name.group, block_id, slot.index, "save"))
                self._begin_save(name, slot)
                num_bytes += self.block_bytes[name.group]
            del self._unsaved[name]
        return moves

    def _begin_save(self, name: BlockHashWithGroupId, slot: Slot) -> None:
        self.under_way[-1].saving[name] = slot
        if self.keeps:
            self._begin_keep(name, slot)

    def _begin_keep(self, name: BlockHashWithGroupId, slot: Slot) -> None:
        self.slots[name.group].hold(slot)
        self.keeping[name] = slot
        self._plan.keep.append(SlotBlock(name.group, slot.index, slot.key))
        if name in self.pins:  # its pin was lost with its file
            self._plan.pin.append(BlockPin(name, self.pins[name]))

    def _whole_slot(self, group: int, key: BlockKey) -> Slot | None:
        """Returns the slot that already contains a block to be written to the store, or None."""
        slot = self.slots[group].find(key) if self.keeps else None
        return slot if slot is not None and slot.ready else None

    def end_step(self) -> ConnectorPlan | None:
        """Returns the plan that the worker half begins after the step's moves. Returns None if
        there is nothing to do.
        """
        if self._completed and not self._unsaved:
            self._plan.complete += self._completed
            self._completed = []
        plan, self._plan = self._plan, ConnectorPlan()
        self.under_way[-1].plan = plan
        return plan if plan != EMPTY_PLAN else None

    def step_done(self, report: ConnectorReport | None) -> None:
        """Processes the report of the oldest step in flight."""
        saving = self.under_way.popleft().saving
        self.stats.num_saved += len(saving)
        for name, slot in saving.items():
            slot.ready = True
            self.slots[name.group].release(slot)
        if report is not None:
            self.process_report(report)

    def step_failed(self) -> None:
        """Undoes the oldest step in flight: its plan was not begun, and it is unknown which of its
        moves were made.
        """
        step = self.under_way[0]
        for name in list(step.saving):
            self._end(step.saving, name, ready=False)
        for block in step.plan.keep:
            self._end(self.keeping, block.name, ready=False)
        for block in step.plan.fetch:
            self._end(self.fetching, block.name, ready=False)
        for query in step.plan.queries:
            self._end_query(query.request_id, [], query.group)
        self._plan.pin = step.plan.pin + self._plan.pin
        self._plan.forget += step.plan.forget
        self._plan.complete += step.plan.complete
        self._plan.cancel += step.plan.cancel
        self._plan.forget_all = step.plan.forget_all

    def process_report(self, report: ConnectorReport) -> None:
        """Processes the outcomes of plans since the last report."""
        self._behind.update(report.found)
        self.pins.update(report.pinned)
        self._behind.difference_update(chain(report.gone, report.not_fetched))
        for name in report.overdue:
            self.fetching[name].is_overdue = True
        for name in report.fetched:
            self._end(self.fetching, name, ready=True)
        for name in report.not_fetched:
            self._end(self.fetching, name, ready=False)
        for name in report.kept:
            if not self.keeping[name].dropped:
                self._behind.add(name)
        for name in chain(report.kept, report.not_kept):
            self.slots[name.group].release(self.keeping.pop(name))
        for answer in report.answers:
            assert self._choice is not None, "nothing else is asked"
            self._end_query(answer.request_id, answer.ratings, self._choice.group)
        self._count(report)

    def _end(
        self,
        on_its_way: dict[BlockHashWithGroupId, Slot],
        name: BlockHashWithGroupId,
        *,
        ready: bool,
    ) -> None:
        slot = on_its_way.pop(name)
        slot.ready = ready
        if not ready:
            self.slots[name.group].drop(slot)
        self.slots[name.group].release(slot)

    def _count(self, report: ConnectorReport) -> None:
        stats = self.stats
        stats.num_fetched += len(report.fetched)
        stats.num_fetched_bytes += sum(self.block_bytes[name.group] for name in report.fetched)
        stats.num_not_fetched += len(report.not_fetched)
        stats.num_kept += len(report.kept)
        stats.num_not_kept += len(report.not_kept)
        stats.stored = report.stored or stats.stored

    def snapshot(self) -> ConnectorStats:
        """Returns the current counters."""
        self.stats.num_used_slots = sum(map(len, self.slots))
        self.stats.num_stored_blocks = len(self._behind)
        return msgspec.structs.replace(self.stats)
