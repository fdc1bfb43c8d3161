"""Status reporting and back-off shared by the sender and the receiver of a transfer channel."""

from __future__ import annotations

from collections.abc import Callable

BUSY_MS = 2
"""Milliseconds until a full socket is retried, and between checks for written layers of a running
step.
"""
IDLE_MS = 250

ReportBlocks = Callable[..., None]
"""Adds blocks to lists of the next report; keyword arguments name the lists."""
