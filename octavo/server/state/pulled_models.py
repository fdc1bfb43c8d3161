"""Pulled models and copied names, persisted in a file for later servers.

Models that are no longer cached are skipped.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

FILE = "models.json"

logger = logging.getLogger(__name__)


class PulledModels:
    """Paths of pulled models by name, and aliases."""

    def __init__(self, folder: Path | None = None) -> None:
        """Reads the file in `folder`; without a folder nothing is persisted."""
        self._file = None if folder is None else folder / FILE
        stored = _read(self._file) if self._file is not None else {}
        models, aliases = _texts(stored.get("models")), _texts(stored.get("aliases"))
        self.models = {name: path for name, path in models.items() if Path(path).exists()}
        self.aliases = dict(aliases)

    def save(self) -> None:
        """Writes the file atomically."""
        if self._file is None:
            return
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._file.with_name(f".{FILE}.{os.getpid()}")
        new.write_text(json.dumps({"models": self.models, "aliases": self.aliases}, indent=1))
        new.replace(self._file)


def _read(file: Path) -> Mapping[str, object]:
    try:
        stored = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("cannot read %s, the list of pulled models: %s", file, error)
        return {}
    return stored if isinstance(stored, dict) else {}


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {str(name): text for name, text in value.items() if isinstance(text, str)}
