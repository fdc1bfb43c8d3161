"""Caches in JSON files, which several processes may share.

Knows nothing of the entries: their owner decides which of them are valid.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_cache(path: Path) -> dict[str, Any]:
    """Returns the entries of a cache file; {} if there are none or they cannot be read."""
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def write_cache(path: Path, entries: Mapping[str, Any]) -> None:
    """Writes a cache file atomically; if several processes write at once, the last one wins.

    Raises OSError, e.g. if the disk is full; the old file is then unchanged.
    """
    temporary = None
    try:
        number, temporary = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        with open(number, "w") as file:
            file.write(json.dumps(entries))
        Path(temporary).replace(path)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise
