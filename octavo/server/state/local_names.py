"""Names of the models in this machine's caches, read again every few seconds at most.

So that requests for unknown names, however many, do not have the caches searched each time.
"""

from __future__ import annotations

import asyncio
import time

from octavo.checkpoint.local_models import CachedModel, list_local_models

FRESH_S = 5.0
"""Seconds for which a listing is used again."""


class LocalNames:
    """The cached models by name."""

    def __init__(self) -> None:
        self._models: list[CachedModel] = []
        self._read_at = float("-inf")
        self._turn = asyncio.Lock()

    def forget(self) -> None:
        """Discards the listing, since the caches have changed."""
        self._read_at = float("-inf")

    async def list(self) -> list[CachedModel]:
        async with self._turn:
            if time.monotonic() - self._read_at > FRESH_S:
                self._models = await asyncio.to_thread(list_local_models)
                self._read_at = time.monotonic()
            return self._models
