"""Paths as users write them: `~` is a home, and a name that no file can have is a file that is not
there.
"""

from __future__ import annotations

import os
from pathlib import Path

from octavo.config.model_reference import parse_hub_reference


def user_path(text: str) -> Path:
    """Returns the path that a user wrote, with `~` resolved; `~name` stays where no such user is
    known.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def cache_dir() -> Path:
    """Returns `$OCTAVO_CACHE`, else `octavo` in `$XDG_CACHE_HOME`, else in ~/.cache."""
    own, users = os.environ.get("OCTAVO_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return user_path(own)
    return (Path(users) if users else Path.home() / ".cache") / "octavo"


def state_home() -> Path:
    """Returns the folder of what Octavo keeps between runs, by the XDG rules."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "octavo"


def open_state_home() -> Path:
    """Returns that folder, which is made where it is missing; only its owner reads it."""
    home = state_home()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def is_there(path: Path) -> bool:
    """Tells whether something exists at a path; False for a name that no file can have."""
    try:
        return path.exists()
    except OSError:  # the name is too long
        return False


def public_name(model: str) -> str:
    """Returns a model's name without the folders of this machine, or the address of the hub; other
    names stay as they are.
    """
    path = user_path(model)
    if not is_there(path):
        reference = parse_hub_reference(model) if "://" in model else None
        return model if reference is None else str(reference)
    return path.resolve().name if path.is_dir() else path.stem
