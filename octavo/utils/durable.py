"""Durable file writes."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Flushes a file or a directory to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
