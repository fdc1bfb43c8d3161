"""Cached headers and digests of local models, invalidated when their files change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from octavo.api.errors import OctavoError
from octavo.checkpoint.digest import get_model_digest
from octavo.wiring.model_outline import ModelOutline, read_outline

T = TypeVar("T")
Version = tuple[int, int]
"""Modification time and size of a file or folder."""

logger = logging.getLogger(__name__)


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
        logger.debug("%s: cannot be described: %s", path, error)
        return None
