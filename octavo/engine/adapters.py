"""LoRA adapters of one engine: the device slot of each, the requests that use it, and the adapters
that are being loaded.

Identifies adapters by a digest of their content; the worker owns the bytes. A request holds its
adapter from its start to its end, and waits while the adapter is loaded. If no slot is free, the
least recently used adapter that no request holds is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.engine.protocol.step import AdapterLoad, AdapterLoaded, AdapterRef

NO_SLOT = -1


@dataclass(slots=True)
class _Resident:
    """An adapter in a slot."""

    slot: int
    is_ready: bool = False
    users: set[str] = field(default_factory=set)
    """Ids of the requests that hold it."""


class AdapterSlotAllocator:
    """Assigns adapters to the adapter slots of the device."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._resident: dict[bytes, _Resident] = {}
        """Adapters by digest, the least recently used first."""
        self._to_load: list[AdapterLoad] = []
        self._is_short = False
        """Whether a request of this step found no free slot; later requests of the step then get
        none.
        """

    def is_ready(self, request_id: str, ref: AdapterRef) -> bool:
        """Returns whether a request may start with its adapter. If the adapter has no slot and one
        is available, the next plan loads it.
        """
        resident = self._resident.get(ref.digest)
        if resident is not None and request_id in resident.users:
            return True
        if self._is_short:
            return False
        resident = resident or self._load(ref)
        return resident is not None and resident.is_ready

    def hold(self, request_id: str, ref: AdapterRef) -> None:
        """Holds the adapter of a request that starts; the adapter must be ready."""
        resident = self._resident.pop(ref.digest)
        resident.users.add(request_id)
        self._resident[ref.digest] = resident

    def release(self, request_id: str, ref: AdapterRef) -> None:
        """Releases the adapter of a request that has ended; does nothing if the request holds
        none.
        """
        if (resident := self._resident.get(ref.digest)) is not None:
            resident.users.discard(request_id)

    def get_slot(self, ref: AdapterRef) -> int:
        """Returns the slot of an adapter that a request holds."""
        return self._resident[ref.digest].slot

    def pop_loads(self) -> list[AdapterLoad]:
        """Removes and returns the adapters that the next plan loads. Called at the end of each
        step.
        """
        self._is_short = False
        loads, self._to_load = self._to_load, []
        return loads

    def load_again(self, loads: Iterable[AdapterLoad]) -> None:
        """Queues adapters to be loaded again after a failed step, which may not have begun their
        loads.
        """
        self._to_load += [
            load
            for load in loads
            if (resident := self._resident.get(load.ref.digest)) is not None
            and not resident.is_ready
        ]

    def loaded(self, reports: Iterable[AdapterLoaded]) -> dict[bytes, str]:
        """Processes the reports of finished loads; returns the errors of failed ones by digest. The
        slots of failed loads are free again.
        """
        faults: dict[bytes, str] = {}
        for report in reports:
            resident = self._resident.get(report.digest)
            if resident is None:
                continue
            if report.fault is None:
                resident.is_ready = True
            else:
                del self._resident[report.digest]
                self._free.append(resident.slot)
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
        resident = self._resident[ref.digest] = _Resident(slot)
        self._to_load.append(AdapterLoad(slot, ref))
        return resident

    def _evict(self) -> int | None:
        """Evicts the least recently used adapter that no request holds, and returns its slot.
        Returns None if every adapter is held or being loaded.
        """
        for digest, resident in self._resident.items():
            if resident.is_ready and not resident.users:
                del self._resident[digest]
                return resident.slot
        return None
