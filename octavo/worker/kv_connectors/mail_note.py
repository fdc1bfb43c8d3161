"""What both sides of a transfer worker's mail share: how they report, and how long they pause."""

from __future__ import annotations

from typing import Protocol

from octavo.engine.protocol.kv_messages import BlockName

BUSY_MS = 2
"""Milliseconds until a message that a full socket did not take is tried again, and until the layers
of a running step are looked at again."""
IDLE_MS = 250


class Note(Protocol):
    """Function that adds blocks to lists of the next report, by the lists' names."""

    def __call__(self, **found: list[BlockName]) -> None: ...
