"""Models that requests may name: registers pulled and cached models, copies names, deletes models.

Only files in this machine's caches are deleted, and only with their last name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from octavo.api.errors import InvalidRequest, ModelNotFound, OctavoError, shown
from octavo.checkpoint.catalogue import short_name
from octavo.checkpoint.digest import get_model_digest
from octavo.checkpoint.local_models import (
    CachedModel,
    find_cached,
    list_local_models,
    match_local_model,
    remove_local_model,
)
from octavo.config.paths import expand_path, path_exists
from octavo.server.loader import ModelLoader
from octavo.server.settings import ServerSettings
from octavo.server.state.adapters import NAME, NAME_RULE
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.model_spec import ModelSpec
from octavo.server.state.pulled_models import PulledModels
from octavo.server.state.slot import EngineSlot
from octavo.wiring.model_outline import ModelOutline, read_outline

T = TypeVar("T")
Version = tuple[int, int]
"""Modification time and size of a file or folder."""
logger = logging.getLogger(__name__)
FRESH_S = 5.0
"""Maximum age of the list in seconds."""
DRAIN_S = 30.0
"""Seconds that running requests have to finish when their model is deleted."""


class KnownModels:
    """Manages the slots of models that were added over HTTP, and their files in the caches."""

    def __init__(
        self,
        models: ModelDirectory,
        loader: ModelLoader,
        settings: ServerSettings,
        pulled: PulledModels | None = None,
    ) -> None:
        self._models = models
        self._loader = loader
        self._settings = settings
        self._pulled = pulled or PulledModels()
        self._local = LocalNames()
        self._files = LocalFiles()
        self._restore()

    def _restore(self) -> None:
        """Restores the models that an earlier server pulled and copied."""
        if self.are_loadable:
            for name, path in self._pulled.models.items():
                if not self._models.answers_to(name):
                    self.add(name, Path(path))
        for alias, name in self._pulled.aliases.items():
            if self._models.answers_to(name) and not self._models.answers_to(alias):
                self._models.set_alias(alias, name)

    @property
    def are_loadable(self) -> bool:
        """Whether requests may load these models."""
        return self._settings.load_on_demand != "none"

    async def local(self) -> Sequence[CachedModel]:
        """Returns the complete models in this machine's caches."""
        return await self._local.list()

    async def describe(self, slots: Iterable[EngineSlot]) -> None:
        """Reads descriptions of models that are not loaded from the headers of local files."""
        for slot in slots:
            if slot.outline is None and (path := await self._path(slot)) is not None:
                slot.describe(await self._files.outline(path, slot.spec.options))

    async def digest(self, slot: EngineSlot) -> str:
        """Returns the digest of a model's files; "" if they are not on this machine."""
        path = await self._path(slot)
        return "" if path is None else await self._files.digest(path)

    async def _path(self, slot: EngineSlot) -> Path | None:
        """Returns the local path of a model's files; None if they are not on this machine."""
        model = slot.spec.model
        path = expand_path(model)
        if short_name(model) is None and path_exists(path):
            return path
        cached = find_cached(model, await self.local())
        return None if cached is None else cached.path

    async def find_local(self, name: str) -> EngineSlot | None:
        """Registers a cached model by its name. Returns None if there is none or the settings do
        not allow it.
        """
        if self._settings.load_on_demand != "local" or not NAME.fullmatch(name):
            return None
        cached = match_local_model(name, await self.local())
        if cached is None:
            return None
        return self._models.get(cached.name) or self.add(cached.name, cached.path)

    def add(self, name: str, path: Path) -> EngineSlot:
        """Registers a model, which its first request loads; returns its slot.

        A model that was added over HTTP keeps its slot and gets the new files at its next load.
        """
        options = {**self._loader.defaults, "model": str(path), "served_model_name": name}
        spec = ModelSpec.of(options, is_pinned=name in self._settings.pin, is_remote=True)
        slot = self._models.get(name)
        if slot is None:
            slot = EngineSlot(spec, is_unloaded=True)
            slot.uses.keep(self._settings.idle_unload)
            self._models.add(slot)
        elif slot.spec.is_remote:
            slot.spec = spec
            slot.describe(None)
        return slot

    async def add_pulled(self, name: str, path: Path) -> None:
        """Registers a pulled model, and persists it for later servers with the same state
        folder.
        """
        self._local.invalidate()
        known = self._models.get(name)
        is_served = self._models.answers_to(name) if known is None else not known.spec.is_remote
        if self.are_loadable and not is_served:
            self.add(name, path)
        self._models.drop_alias(name)
        self._pulled.aliases.pop(name, None)
        self._pulled.models[name] = str(path)
        await asyncio.to_thread(self._pulled.save)

    async def copy(self, source: EngineSlot, name: str) -> None:
        """Adds an alias of a model; an existing alias may be reassigned."""
        if not NAME.fullmatch(name):
            raise InvalidRequest(
                f"destination: got {shown(name)}, expected {NAME_RULE}", param="destination"
            )
        if self._models.answers_to(name) or self._models.with_adapter(name) is not None:
            if self._models.get(name) is source:
                return
            raise HTTPException(
                409,
                f"a model is already named `{name}` (hint: use another name, or delete it first)",
            )
        self._models.set_alias(name, source.name)
        self._pulled.aliases[name] = source.name
        await asyncio.to_thread(self._pulled.save)

    async def delete(self, name: str) -> None:
        """Removes a name, and with a model's last name its files; aborts running requests.

        Raises ModelNotFound, or InvalidRequest for a model outside the caches.
        """
        if self._models.drop_alias(name):
            await self._forget(name)
            return
        slot = self._slot(name)
        cached = await self._find_cached(name if slot is None else slot.spec.model)
        if slot is None and cached is None:
            raise ModelNotFound(
                f"The model `{shown(name)[1:-1]}` does not exist.",
                param="model",
                hint="GET /v1/models lists the models",
            )
        if cached is None:
            raise InvalidRequest(
                f"model: the files of `{name}` are not in a cache of this machine",
                hint="unload it with POST /v1/models/unload",
                param="model",
            )
        if slot is not None:
            name = slot.name
            await self._remove_name(slot, cached)
        await self._forget(name)
        if not any(
            find_cached(remaining_slot.spec.model, [cached]) for remaining_slot in self._models
        ):
            await asyncio.to_thread(remove_local_model, cached)
        self._local.invalidate()

    def _slot(self, name: str) -> EngineSlot | None:
        try:
            return self._models.find(name) if self._models.answers_to(name) else None
        except OctavoError:
            return None

    async def _remove_name(self, slot: EngineSlot, cached: CachedModel) -> None:
        """Removes a name from a model. The model gets its first alias as its name; without an alias
        it is unloaded.
        """
        copies = [name for name, target in self._pulled.aliases.items() if target == slot.name]
        if not copies:
            if slot.state in ("loading", "draining"):
                raise HTTPException(409, f"the model `{slot.name}` is {slot.state}, try again soon")
            await asyncio.shield(self._loader.unload(slot, timeout_s=DRAIN_S))
            return
        first, *others = copies
        self._models.drop_alias(first)
        del self._pulled.aliases[first]
        self._pulled.models[first] = str(cached.path)
        self._models.rename(slot, first, str(cached.path))
        for other in others:
            self._models.set_alias(other, first)
            self._pulled.aliases[other] = first

    async def _find_cached(self, model: str) -> CachedModel | None:
        """Returns the cached model with this name or path, or None if there is none."""
        self._local.invalidate()
        return find_cached(model, await self.local())

    async def _forget(self, name: str) -> None:
        self._pulled.models.pop(name, None)
        self._pulled.aliases.pop(name, None)
        await asyncio.to_thread(self._pulled.save)


class LocalNames:
    """The list of models in this machine's caches, refreshed at most every few seconds.

    Without it, each request with an unknown model name would scan the caches.
    """

    def __init__(self) -> None:
        self._models: list[CachedModel] = []
        self._read_at = float("-inf")
        self._turn = asyncio.Lock()

    def invalidate(self) -> None:
        """Invalidates the list after a change of the caches."""
        self._read_at = float("-inf")

    async def list(self) -> list[CachedModel]:
        async with self._turn:
            if time.monotonic() - self._read_at > FRESH_S:
                self._models = await asyncio.to_thread(list_local_models)
                self._read_at = time.monotonic()
            return self._models


class LocalFiles:
    """Headers and digests by path."""

    def __init__(self) -> None:
        self._outlines: dict[Path, tuple[Version, ModelOutline | None]] = {}
        self._digests: dict[Path, tuple[Version, str | None]] = {}
        self._turn = asyncio.Lock()

    async def outline(self, path: Path, options: Mapping[str, Any]) -> ModelOutline | None:
        """Returns a model's description from its headers; None if they cannot be read."""
        return await self._read(self._outlines, path, lambda: read_outline(path, options))

    async def digest(self, path: Path) -> str:
        """Returns the digest of a model's files; "" if they cannot be read."""
        return await self._read(self._digests, path, lambda: get_model_digest(path)) or ""

    async def _read(
        self, known: dict[Path, tuple[Version, T | None]], path: Path, read: Callable[[], T]
    ) -> T | None:
        async with self._turn:
            try:
                state = path.stat()
            except OSError:
                return None
            version = (state.st_mtime_ns, state.st_size)
            if path not in known or known[path][0] != version:
                known[path] = (version, await asyncio.to_thread(_attempt, read, path))
            return known[path][1]


def _attempt(read: Callable[[], T], path: Path) -> T | None:
    try:
        return read()
    except (OctavoError, OSError, ValueError) as error:
        logger.debug("cannot read the headers of %s: %s", path, error)
        return None
