"""Paths as users write them: `~` is a home, and a name that no file can have is a file that is not
there.
"""

from __future__ import annotations

from pathlib import Path


def user_path(text: str) -> Path:
    """Without `~`, unless nobody has that home."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long
        return False
