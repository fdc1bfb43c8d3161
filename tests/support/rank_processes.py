"""The processes of ranks that a test has started."""

from __future__ import annotations

import contextlib
from pathlib import Path


def ranks_below(pid: int) -> list[int]:
    """Returns the ids of the rank processes that a process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == pid
                and b"octavo.worker.ranks.process" in (folder / "cmdline").read_bytes()
            ):
                found.append(int(folder.name))
    return found
