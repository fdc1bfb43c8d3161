"""Loads models on their first request and unloads idle ones.

Runs in the event loop; engines are built and closed in the loader's threads. Pinned models and
models with requests are never unloaded here. Requests for a model that is being loaded or unloaded
wait. Loads by operators evict models in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

from octavo.api.errors import (
    DownloadFailed,
    InsufficientMemory,
    ModelNotFound,
    OctavoError,
    ServerError,
    Unavailable,
)
from octavo.server.known_models import KnownModels
from octavo.server.loader import ModelLoader
from octavo.server.settings import ServerSettings
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.slot import EngineSlot

LOOK_EVERY_S = 0.25
"""Interval of checks for idle models, in seconds."""
ROOM_WAIT_S = 60.0
"""Seconds for which a load waits until a model in use becomes idle and can be evicted."""


class Residency:
    """Loads and unloads the models of a directory on demand."""

    def __init__(
        self,
        models: ModelDirectory,
        loader: ModelLoader,
        settings: ServerSettings,
        known: KnownModels,
    ) -> None:
        self._models = models
        self._loader = loader
        self._settings = settings
        self._known = known
        self._loads: dict[EngineSlot, asyncio.Task[None]] = {}
        self._unloads: dict[EngineSlot, asyncio.Task[None]] = {}
        self._room = asyncio.Lock()
        """Lock that is held during eviction, so that concurrent loads do not evict more than
        necessary.
        """
        for slot in models:
            slot.uses.keep(settings.idle_unload)

    # -- finding -----------------------------------------------------------------------------------

    async def find(self, name: str | None) -> EngineSlot:
        """Returns the slot of a model; with `load_on_demand` local also of a cached one. Raises
        ModelNotFound.
        """
        try:
            return self._models.find(name)
        except ModelNotFound:
            local_slot = None if name is None else await self._known.find_local(name)
            if local_slot is None:
                raise
            return local_slot

    # -- loading -----------------------------------------------------------------------------------

    async def load(self, slot: EngineSlot) -> float:
        """Loads a model if it is unloaded; returns the seconds that this took.

        Concurrent requests wait for the same load. A failed load is retried by the next request.
        Raises Unavailable if there is no room, DownloadFailed, or ServerError if the model cannot
        be loaded.
        """
        if slot.state == "ready":
            return 0.0
        began = time.monotonic()
        while (leaving := self._unloads.get(slot)) is not None:
            await asyncio.shield(leaving)
        if slot.state == "unloaded" and slot not in self._loads and self.are_loadable:
            self.start(slot, on_request=True)
        loading = self._loads.get(slot)
        if loading is not None and slot.uses.loads_on_request:
            await asyncio.shield(loading)
        return time.monotonic() - began

    def start(self, slot: EngineSlot, *, on_request: bool = False) -> None:
        """Loads a model in the background, after evicting others if necessary."""
        slot.uses.loads_on_request = on_request
        slot.uses.keep(self._settings.idle_unload)
        self._loads[slot] = asyncio.get_running_loop().create_task(self._load(slot))
        self._loads[slot].add_done_callback(_retrieve)

    @property
    def are_loadable(self) -> bool:
        """Whether requests may load models now."""
        return self._settings.load_on_demand != "none" and not self._models.is_stopping

    async def _load(self, slot: EngineSlot) -> None:
        try:
            await self._admit(slot)
            await self._loader.load(slot)
            while isinstance(slot.error, InsufficientMemory) and await self._make_room(slot):
                slot.begin_load()
                await self._loader.load(slot)
            if slot.error is None or slot.is_draining:
                return
            self._loader.note_failure(slot)
            if slot.uses.loads_on_request:
                self._raise_failure(slot, slot.error)
        finally:
            del self._loads[slot]

    async def _admit(self, slot: EngineSlot) -> None:
        """Begins to load the slot once fewer than `max_models` are in memory."""
        limit = self._settings.max_models
        while slot.state == "unloaded":
            if self._models.num_in_memory < limit:
                slot.begin_load()
            elif not await self._make_room(slot):
                self._raise_no_room(slot, f"{limit} models are loaded, the maximum")

    def _raise_no_room(self, slot: EngineSlot, reason: str) -> NoReturn:
        slot.reset()
        raise Unavailable(
            f"the model `{slot.name}` cannot be loaded now: {reason}",
            hint="models that are in use or pinned are not unloaded; try again when one is idle",
        )

    def _raise_failure(self, slot: EngineSlot, error: Exception) -> NoReturn:
        """Raises the error of a failed load; the next request retries it."""
        reason = slot.reason
        if isinstance(error, InsufficientMemory):
            self._raise_no_room(slot, reason)
        slot.reset()
        kind = type(error) if isinstance(error, DownloadFailed) else ServerError
        raise kind(
            f"the model `{slot.name}` failed to load: {reason}",
            hint=error.hint if isinstance(error, OctavoError) else None,
        )

    # -- unloading ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Unloads models after their idle timeout while the context is active."""
        watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for slot in self._models:
                if slot.loaded is not None and slot.loaded.num_unfinished:
                    slot.uses.used_at = time.monotonic()
                left_s = slot.uses.expires_in_s
                if left_s is not None and left_s <= 0 and self._is_idle(slot):
                    self._unload(slot, slot.uses.unload_reason)

    async def _make_room(self, slot_to_load: EngineSlot) -> bool:
        """Unloads the model that was idle for longest, waiting for one if all are in use.

        Returns False if none can be unloaded, or none becomes idle within ROOM_WAIT_S.
        """
        end = time.monotonic() + ROOM_WAIT_S
        async with self._room:
            while True:
                others = [slot for slot in self._models if slot is not slot_to_load]
                idle = [slot for slot in others if self._is_idle(slot)]
                if idle:
                    oldest = min(idle, key=lambda slot: slot.uses.used_at)
                    await asyncio.shield(
                        self._unload(oldest, f"to make room for {slot_to_load.name}")
                    )
                    return True
                if not any(map(self.may_unload, others)) or time.monotonic() > end:
                    return False
                await asyncio.sleep(LOOK_EVERY_S)

    def may_unload(self, slot: EngineSlot) -> bool:
        """Returns whether a model may be unloaded when idle and reloaded by a request."""
        is_in_memory = slot.state in ("loading", "ready")
        return self.are_loadable and is_in_memory and not slot.spec.is_pinned

    def _is_idle(self, slot: EngineSlot) -> bool:
        llm = slot.loaded
        if llm is None or slot.state != "ready" or not self.may_unload(slot):
            return False
        return slot.uses.num_held == 0 and llm.num_unfinished == 0

    def _unload(self, slot: EngineSlot, reason: str) -> asyncio.Task[None]:
        slot.drain(f"the model `{slot.name}` is being unloaded")
        task = asyncio.get_running_loop().create_task(self._end(slot, reason))
        self._unloads[slot] = task
        return task

    async def _end(self, slot: EngineSlot, reason: str) -> None:
        try:
            await self._loader.close(slot, reason)
        finally:
            del self._unloads[slot]
        if not self._models.is_stopping:
            slot.reset()


def _retrieve(task: asyncio.Task[None]) -> None:
    """Marks a load's error as retrieved; it was raised to the waiting requests."""
    if not task.cancelled():
        task.exception()
