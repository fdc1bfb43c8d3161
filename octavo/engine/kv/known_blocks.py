"""Keeps the names of an engine's blocks as its block events tell them."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.routing.cached_names import CachedNames
from octavo.transfer.block_events import BlockEvent, BlocksRemoved, BlocksStored


def note_events(cached: CachedNames, events: Iterable[BlockEvent]) -> None:
    """Takes in what an engine's prefix cache has gained and lost."""
    for event in events:
        if isinstance(event, BlocksStored):
            cached.add(event.digests)
        elif isinstance(event, BlocksRemoved):
            cached.remove(event.digests)
        else:
            cached.clear()
