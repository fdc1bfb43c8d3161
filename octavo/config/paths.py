"""Paths given by users, and the directories of caches and state."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.config.model_reference import parse_hub_reference


def expand_path(text: str) -> Path:
    """Returns the path with `~` expanded; `~name` is unchanged if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def cache_dir() -> Path:
    """Returns `$OCTAVO_CACHE`, or `octavo` in `$XDG_CACHE_HOME` or ~/.cache."""
    own, users = os.environ.get("OCTAVO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return expand_path(own)
    return (Path(users) if users else Path.home() / ".cache") / "octavo"


def state_home() -> Path:
    """Returns the directory of persistent state, by the XDG rules."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "octavo"


def open_state_home() -> Path:
    """Returns `state_home`, created if missing, readable only by its owner."""
    home = state_home()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def path_exists(path: Path) -> bool:
    """Returns whether a path exists; False for names that no file can have."""
    try:
        return path.exists()
    except OSError:  # the name is too long
        return False


def public_name(model: str) -> str:
    """Returns a model's name without this machine's directories or the hub's address."""
    path = expand_path(model)
    if not path_exists(path):
        reference = parse_hub_reference(model) if "://" in model else None
        return model if reference is None else str(reference)
    return path.resolve().name if path.is_dir() else path.stem
