"""Which models are in memory: loads one at its first request, unloads those that nobody uses.

Works in the event loop; the engines come and go in the loader's threads. A model that HTTP requests
hold or that computes is never unloaded here, nor one that is pinned. Requests that come while their
model loads or goes wait for it. The operator's own loads make room in the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from octavo.errors import InsufficientMemory, ModelNotFound, Unavailable
from octavo.server.known_models import KnownModels
from octavo.server.loader import ModelLoader
from octavo.server.settings import ServerSettings
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.slot import EngineSlot

LOOK_EVERY_S = 0.25
"""Period at which idle models are looked for, in seconds."""
RETRY_S = 10.0
"""Seconds after a failed load before a request tries it again."""


class Residency:
    """Loads and unloads the models of a directory as requests come and stay away."""

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
        for slot in models:
            slot.uses.keep_s = settings.idle_unload

    # -- finding -----------------------------------------------------------------------------------

    async def find(self, name: str | None) -> EngineSlot:
        """Returns the slot that a request means; with `load_on_demand` local also one for a model
        of this machine's caches. Raises ModelNotFound.
        """
        try:
            return self._models.find(name)
        except ModelNotFound:
            found = None if name is None else await self._known.find_local(name)
            if found is None:
                raise
            return found

    # -- loading -----------------------------------------------------------------------------------

    async def load(self, slot: EngineSlot) -> float:
        """Waits until a model that loads on request is ready or has failed; returns the seconds.

        Other models are left as they are. Raises Unavailable if there is no room for it.
        """
        if slot.state == "ready":
            return 0.0
        began = time.monotonic()
        while (leaving := self._unloads.get(slot)) is not None:
            await asyncio.shield(leaving)
        if slot not in self._loads and self._may_load(slot):
            self.start(slot, on_request=True)
        loading = self._loads.get(slot)
        if loading is not None and slot.uses.loads_on_request:
            await asyncio.shield(loading)
        return time.monotonic() - began

    def start(self, slot: EngineSlot, *, on_request: bool = False) -> None:
        """Loads a model in the background, after others have made room where that is needed."""
        slot.uses.loads_on_request = on_request
        slot.uses.keep_s = self._settings.idle_unload
        slot.begin_load()
        task = asyncio.get_running_loop().create_task(self._load(slot))
        self._loads[slot] = task
        task.add_done_callback(lambda _: self._loads.pop(slot, None))
        task.add_done_callback(_retrieve)

    def _may_load(self, slot: EngineSlot) -> bool:
        """Tells whether a request may load a model now."""
        if self._models.is_stopping or self._settings.load_on_demand == "none":
            return False
        is_old = slot.state == "failed" and time.monotonic() - slot.failed_at > RETRY_S
        return slot.state == "unloaded" or (is_old and slot.uses.loads_on_request)

    async def _load(self, slot: EngineSlot) -> None:
        while self._models.num_in_memory > self._settings.max_models:
            if not await self._evict_for(slot):
                limit = self._settings.max_models
                self._refuse(slot, f"{limit} models are loaded, and allowed are {limit}")
        while True:
            await self._loader.load(slot)
            if not isinstance(slot.error, InsufficientMemory) or slot.is_draining:
                return
            if not await self._evict_for(slot):
                break
            slot.begin_load()
        if slot.uses.loads_on_request:
            self._refuse(slot, slot.error.message)
        self._loader.note_failure(slot)

    def _refuse(self, slot: EngineSlot, reason: str) -> None:
        """Gives up a load for want of room; a later request may try again."""
        slot.reset()
        raise Unavailable(
            f"the model `{slot.name}` cannot be loaded now: {reason}",
            hint="models that are in use or pinned stay; try again when one of them is idle",
        )

    # -- unloading ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Unloads models whose time is up, as long as the context lasts."""
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
                    self._unload(slot, "it was idle")

    async def _evict_for(self, wanted: EngineSlot) -> bool:
        """Unloads the model that was idle for longest; returns False if none is idle."""
        idle = [slot for slot in self._models if slot is not wanted and self._is_idle(slot)]
        if not idle:
            return False
        oldest = min(idle, key=lambda slot: slot.uses.used_at)
        await asyncio.shield(self._unload(oldest, f"to make room for {wanted.name}"))
        return True

    def _is_idle(self, slot: EngineSlot) -> bool:
        """Tells whether a model may be unloaded and loaded again by a request."""
        llm = slot.loaded
        if llm is None or slot.state != "ready" or slot.spec.is_pinned:
            return False
        is_unused = slot.uses.num_held == 0 and llm.num_unfinished == 0
        return is_unused and self._settings.load_on_demand != "none"

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
    """Takes a load's error, which those who wait for it have got."""
    if not task.cancelled():
        task.exception()
