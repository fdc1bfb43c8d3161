"""The slots of host memory through which blocks of one cache group leave the device and come back:
which block each one holds.

A slot is held while it is filled or read, or while a request waits for it; of the others the least
recently used goes first. Knows no byte: the worker half of the connector owns them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from octavo.step import BlockKey


class Slot:
    """A block in a slot: `ready` once its bytes are there, `dropped` once it is not to be found any
    more.
    """

    __slots__ = ("dropped", "index", "is_late", "key", "num_holds", "ready")

    def __init__(self, index: int, key: BlockKey) -> None:
        self.index = index
        self.key = key
        self.num_holds = 1
        self.ready = False
        self.dropped = False
        self.is_late = False

    @property
    def is_awaited(self) -> bool:
        return not (self.ready or self.dropped or self.is_late)


class ConnectorSlots:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[bytes, Slot] = {}
        self._idle: OrderedDict[bytes, Slot] = OrderedDict()
        """Held by nobody, the least recently used first."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    def has_name(self, key: BlockKey) -> bool:
        """Of this block, or (a collision of digests) of another."""
        return key.digest in self._slots

    def find(self, key: BlockKey) -> Slot | None:
        slot = self._slots.get(key.digest)
        return slot if slot is not None and slot.key == key else None

    def claim(self, key: BlockKey) -> Slot | None:
        """A slot to be filled with a block that has none, held once; None where all are held."""
        assert key.digest not in self._slots
        if not self._free:
            if not self._idle:
                return None
            _, oldest = self._idle.popitem(last=False)
            del self._slots[oldest.key.digest]
            self._free.append(oldest.index)
        slot = self._slots[key.digest] = Slot(self._free.pop(), key)
        return slot

    def hold(self, slot: Slot) -> None:
        slot.num_holds += 1
        self._idle.pop(slot.key.digest, None)

    def release(self, slot: Slot) -> None:
        """The last to be used from now on, once nobody holds it."""
        slot.num_holds -= 1
        if slot.num_holds == 0:
            if slot.dropped:
                self._free.append(slot.index)
            else:
                self._idle[slot.key.digest] = slot

    def drop(self, slot: Slot) -> None:
        """Not to be found any more; the slot is free once nobody holds it."""
        if slot.dropped:
            return
        slot.dropped = True
        del self._slots[slot.key.digest]
        if self._idle.pop(slot.key.digest, None) is not None:
            self._free.append(slot.index)
