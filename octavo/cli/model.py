"""Finds the model that a command works with, with progress bars where it has to be fetched."""

from __future__ import annotations

from typing import Any

from octavo.config.model_options import DEFAULT_MODEL
from octavo.config.paths import public_name


def fetched(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options with `model` as a local path, served under the name that was given."""
    from octavo.checkpoint.catalogue import resolve

    name = options.get("model", DEFAULT_MODEL)
    path = str(resolve(name, progress=True))
    return {"served_model_name": public_name(name), **options, "model": path}
