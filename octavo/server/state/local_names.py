"""The list of models in this machine's caches, refreshed at most every few seconds.

Without it, each request with an unknown model name would scan the caches.
"""

from __future__ import annotations

import asyncio
import time

from octavo.checkpoint.local_models import CachedModel, list_local_models

FRESH_S = 5.0
"""Maximum age of the list in seconds."""


class LocalNames:
    def __init__(self) -> None:
        self._models: list[CachedModel] = []
        self._read_at = float("-inf")
        self._turn = asyncio.Lock()

    def forget(self) -> None:
        """Invalidates the list after a change of the caches."""
        self._read_at = float("-inf")

    async def list(self) -> list[CachedModel]:
        async with self._turn:
            if time.monotonic() - self._read_at > FRESH_S:
                self._models = await asyncio.to_thread(list_local_models)
                self._read_at = time.monotonic()
            return self._models
