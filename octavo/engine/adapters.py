"""LoRA adapters of one engine: the device slot of each, which requests use it, and which adapters
are being loaded.

Identifies adapters by a digest of their content; the worker owns the bytes. A request holds its
adapter from its first start to its end, and waits for it as it waits for blocks that are being
fetched. If no slot is free, the least recently used adapter that no request holds is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.engine.protocol.step import AdapterLoad, AdapterLoaded, AdapterRef

NO_SLOT = -1


@dataclass(slots=True)
class _Resident:
    """An adapter with a slot."""

    slot: int
    is_ready: bool = False
    users: set[str] = field(default_factory=set)
    """Requests that hold it."""


class AdapterSlotAllocator:
    """Slots of the device, and the adapters in them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._resident: dict[bytes, _Resident] = {}
        """Adapters by digest, the least recently used first."""
        self._to_load: list[AdapterLoad] = []
        self._is_short = False
        """Whether a request of this step found no slot; those behind it then take none."""

    def is_ready(self, request_id: str, ref: AdapterRef) -> bool:
        """Returns whether a request may start with its adapter. If the adapter has no slot and one
        is available, the next plan loads it.
        """
        found = self._resident.get(ref.digest)
        if found is not None and request_id in found.users:
            return True
        if self._is_short:
            return False
        found = found or self._load(ref)
        return found is not None and found.is_ready

    def hold(self, request_id: str, ref: AdapterRef) -> None:
        """Holds the adapter of a request that starts, which is ready."""
        found = self._resident.pop(ref.digest)
        found.users.add(request_id)
        self._resident[ref.digest] = found

    def release(self, request_id: str, ref: AdapterRef) -> None:
        """Releases the adapter of a request that has ended, if it held one."""
        if (found := self._resident.get(ref.digest)) is not None:
            found.users.discard(request_id)

    def get_slot(self, ref: AdapterRef) -> int:
        """Returns the slot of an adapter that is held."""
        return self._resident[ref.digest].slot

    def pop_loads(self) -> list[AdapterLoad]:
        """Removes and returns the adapters that the next plan loads, and ends the step."""
        self._is_short = False
        loads, self._to_load = self._to_load, []
        return loads

    def load_again(self, loads: Iterable[AdapterLoad]) -> None:
        """Reloads adapters whose load a failed step may not have begun."""
        self._to_load += [
            load
            for load in loads
            if (found := self._resident.get(load.ref.digest)) is not None and not found.is_ready
        ]

    def loaded(self, reports: Iterable[AdapterLoaded]) -> dict[bytes, str]:
        """Processes the outcomes of loads; returns the faults of those that failed, by
        digest. Their slots are free again.
        """
        faults: dict[bytes, str] = {}
        for report in reports:
            found = self._resident.get(report.digest)
            if found is None:
                continue
            if report.fault is None:
                found.is_ready = True
            else:
                del self._resident[report.digest]
                self._free.append(found.slot)
                faults[report.digest] = report.fault
        return faults

    @property
    def names(self) -> list[bytes]:
        """Digests of the adapters in slots, the least recently used first."""
        return list(self._resident)

    def _load(self, ref: AdapterRef) -> _Resident | None:
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            self._is_short = True
            return None
        found = self._resident[ref.digest] = _Resident(slot)
        self._to_load.append(AdapterLoad(slot, ref))
        return found

    def _evict(self) -> int | None:
        """Returns the slot of the least recently used adapter that no request holds."""
        for digest, found in self._resident.items():
            if found.is_ready and not found.users:
                del self._resident[digest]
                return found.slot
        return None
