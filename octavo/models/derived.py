"""Stored Programs of model types that have no module here, made by `octavo derive`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config.paths import cache_dir
from octavo.program.program import Program
from octavo.program.serialize import from_json

IRRELEVANT = frozenset(
    ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "auto_map")
)
"""Keys of config.json that do not change the model."""


def program_path(config: Mapping[str, Any]) -> Path:
    """Returns where the Programs of a config are stored."""
    kept = {key: value for key, value in config.items() if key not in IRRELEVANT}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:24]
    name = re.sub(r"[^a-z0-9_-]", "-", str(config.get("model_type")).lower())[:40]
    return cache_dir() / "programs" / f"{name}-{digest}.json"


def read_programs(config: Mapping[str, Any]) -> dict[str, Program]:
    """Returns the stored Programs of a config."""
    path = program_path(config)
    return from_json(json.loads(path.read_text()), str(path))
