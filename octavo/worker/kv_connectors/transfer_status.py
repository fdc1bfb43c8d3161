"""Status reporting and back-off shared by the sender and the receiver of a transfer channel."""

from __future__ import annotations

from typing import Protocol

from octavo.engine.protocol.kv_messages import BlockName

BUSY_MS = 2
"""Milliseconds until a message is retried on a full socket, and between checks of the layers of a
running step."""
IDLE_MS = 250


class ReportBlocks(Protocol):
    """Adds blocks to lists of the next report; keyword arguments name the lists."""

    def __call__(self, **found: list[BlockName]) -> None: ...
