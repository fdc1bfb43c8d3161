"""Events of cached blocks in an engine's KV cache, which its core sends to the frontend."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.engine.protocol.kv_messages import BlockKey


class BlocksStored(msgspec.Struct, tag=True, array_like=True):
    """Blocks of one chain that are now in the prefix cache."""

    digests: list[bytes]
    parent: bytes
    """Digest of the block before the first one, or the root of the chain."""
    token_ids: list[int]


class BlocksRemoved(msgspec.Struct, tag=True, array_like=True):
    """Blocks that are no longer in the prefix cache."""

    digests: list[bytes]


class BlocksCleared(msgspec.Struct, tag=True, array_like=True):
    """All blocks are removed, because the cache was reset or the engine replaced."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class BlockEventLog:
    """Events of one cache group since `pop_events` was last called. Consecutive blocks share one
    event.
    """

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def stored(self, digest: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.digests[-1] == parent:
            last.digests.append(digest)
            last.token_ids.extend(token_ids)
        else:
            self._events.append(BlocksStored([digest], parent, list(token_ids)))

    def removed(self, key: BlockKey) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.digests.append(key.digest)
        else:
            self._events.append(BlocksRemoved([key.digest]))

    def cleared(self) -> None:
        self._events = [BlocksCleared()]

    def pop_events(self) -> list[BlockEvent]:
        """Removes and returns the events in order."""
        events, self._events = self._events, []
        return events
