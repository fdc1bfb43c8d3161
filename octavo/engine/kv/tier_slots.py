"""Slots of host memory for saved and loaded blocks of one cache group: which block each slot
contains.

A slot is held while it is filled or read, or while a request waits for it. The least recently used
of the other slots is reused first, or, among the oldest few, the slot with the lowest rating. The
worker half of the connector owns the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from octavo.engine.protocol.kv_messages import BlockKey

CONSIDERED = 32
"""Number of least recently used slots among which the one with the lowest rating is reused."""


class Slot:
    """A block in a slot."""

    __slots__ = ("dropped", "index", "is_overdue", "key", "num_holds", "rating", "ready")

    def __init__(self, index: int, key: BlockKey) -> None:
        self.index = index
        self.key = key
        self.num_holds = 1
        self.ready = False
        """Whether its bytes have arrived."""
        self.dropped = False
        """Whether the block was removed; the slot is freed when nothing holds it."""
        self.is_overdue = False
        """Whether its bytes take so long that no request waits for them any more."""
        self.rating = 0.0
        """Rating of the block; 0 if it was never rated."""

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for its bytes."""
        return not (self.ready or self.dropped or self.is_overdue)


class TierSlots:
    """The slots of one cache group."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        """Slots without a block."""
        self._slots: dict[bytes, Slot] = {}
        self.idle: OrderedDict[bytes, Slot] = OrderedDict()
        """Slots with a block that nothing holds, least recently used first."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    def has_name(self, key: BlockKey) -> bool:
        """Returns whether a slot has this digest, of this block or (in a hash collision) of another
        one.
        """
        return key.digest in self._slots

    def find(self, key: BlockKey) -> Slot | None:
        """Returns the slot that contains this block or is being filled with it. Returns None if
        there is none.
        """
        slot = self._slots.get(key.digest)
        return slot if slot is not None and slot.key == key else None

    def claim(self, key: BlockKey) -> Slot | None:
        """Allocates a slot for a block that has none, and holds it. Returns None if all slots are
        held.
        """
        assert key.digest not in self._slots
        if not self.free:
            if not self.idle:
                return None
            oldest = islice(self.idle.values(), CONSIDERED)
            evicted = min(oldest, key=lambda slot: slot.rating)
            del self.idle[evicted.key.digest], self._slots[evicted.key.digest]
            self.free.append(evicted.index)
        slot = self._slots[key.digest] = Slot(self.free.pop(), key)
        return slot

    def hold(self, slot: Slot) -> None:
        """Holds a slot, so that it is not reused for another block."""
        slot.num_holds += 1
        self.idle.pop(slot.key.digest, None)

    def release(self, slot: Slot) -> None:
        """Releases one hold; after the last one the slot is the most recently used."""
        slot.num_holds -= 1
        if slot.num_holds == 0:
            if slot.dropped:
                self.free.append(slot.index)
            else:
                self.idle[slot.key.digest] = slot

    def drop(self, slot: Slot) -> None:
        """Removes a block; its slot becomes free when nothing holds it."""
        if slot.dropped:
            return
        slot.dropped = True
        del self._slots[slot.key.digest]
        if self.idle.pop(slot.key.digest, None) is not None:
            self.free.append(slot.index)
