"""Reads the small JSON files of a checkpoint; errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.api.errors import WeightMismatch


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises WeightMismatch if it is missing or damaged."""
    content = _read(path)
    if not isinstance(content, dict):
        raise WeightMismatch(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """Returns the list of objects in a JSON file; raises WeightMismatch like `read_json`."""
    content = _read(path)
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise WeightMismatch(f"{path}: expected a list of JSON objects")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty if the file does not exist."""
    return read_json(path) if path.exists() else {}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise WeightMismatch(
            f"{path}: the file is missing",
            hint="the download may be incomplete; run octavo pull again",
        ) from error
    except (ValueError, RecursionError) as error:
        raise WeightMismatch(
            f"{path}: not valid JSON: {error}", hint="download the file again"
        ) from error
