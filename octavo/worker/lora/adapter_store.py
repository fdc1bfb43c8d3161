"""The adapters of one worker: reads them in a background thread, caches the most recently used ones
in host memory, and puts them into the slots of the prepared Programs.

The engine decides which adapter has which slot (`engine/adapters.py`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from octavo.api.errors import OctavoError, WeightMismatch, WorkerFailed
from octavo.engine.protocol.step import AdapterLoad, AdapterLoaded, AdapterRef
from octavo.executor.base import AdapterSlots, PackedAdapter
from octavo.worker.lora.adapter_reader import Adapter

logger = logging.getLogger(__name__)

ReadAdapter = Callable[[Path], Adapter]

Packed = Sequence[PackedAdapter]
"""An adapter, packed for each of the prepared Programs."""


class AdapterStore:
    """Adapters that are being loaded, and adapters cached in host memory."""

    def __init__(self, read: ReadAdapter, slots: Sequence[AdapterSlots], max_kept: int) -> None:
        self._read = read
        self._slots = slots
        self._max_kept = max_kept
        self._kept: OrderedDict[bytes, Packed] = OrderedDict()
        """Adapters in host memory by digest, least recently used first."""
        self._pending: dict[int, tuple[AdapterRef, Future[Packed]]] = {}
        """Adapters that are being read, by slot."""
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, loads: Sequence[AdapterLoad]) -> None:
        """Frees the slots of these adapters and starts reading those that are not cached."""
        for load in loads:
            for slots in self._slots:
                slots.drop(load.slot)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "adapters")
            cached = self._kept.get(load.ref.digest)
            future = self._pool.submit(self._load, load.ref, cached)
            self._pending[load.slot] = (load.ref, future)

    def pop_loaded(self, *, wait_s: float) -> list[AdapterLoaded]:
        """Puts adapters that have been read into their slots and returns them. Waits at most
        `wait_s` seconds for the first one.
        """
        if not self._pending:
            return []
        wait([future for _, future in self._pending.values()], wait_s, FIRST_COMPLETED)
        done = [slot for slot, (_, future) in self._pending.items() if future.done()]
        return [self._put(slot, *self._pending.pop(slot)) for slot in done]

    def await_slots(self, slots: Iterable[int]) -> None:
        """Waits until these slots are loaded. With several ranks, other ranks may still be loading
        when the first one is done. Raises WorkerFailed if an adapter cannot be loaded here.
        """
        for slot in slots:
            if slot in self._pending:
                loaded = self._put(slot, *self._pending.pop(slot))
                if loaded.fault is not None:
                    raise WorkerFailed(loaded.fault)

    def close(self) -> None:
        """Stops the thread after the adapter that it is reading."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, ref: AdapterRef, cached: Packed | None) -> Packed:
        """Reads and packs an adapter unless it is cached; called in the thread."""
        if cached is not None:
            return cached
        adapter = self._read(Path(ref.path))
        if adapter.digest != ref.digest:
            raise WeightMismatch(
                f"{ref.path}: the adapter's files have changed since it was registered",
                hint="load it under another name or from another directory",
            )
        return [slots.pack(adapter.updates) for slots in self._slots]

    def _put(self, slot: int, ref: AdapterRef, future: Future[Packed]) -> AdapterLoaded:
        try:
            packed = future.result()
            for slots, each in zip(self._slots, packed, strict=True):
                slots.put(slot, each)
        except Exception as error:
            logger.warning("the adapter %s could not be loaded: %s", ref.name, error)
            reason = error.message if isinstance(error, OctavoError) else describe(error)
            return AdapterLoaded(
                ref.digest, f"the adapter {ref.name} could not be loaded: {reason}"
            )
        self._kept[ref.digest] = packed
        self._kept.move_to_end(ref.digest)
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)
        return AdapterLoaded(ref.digest)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
