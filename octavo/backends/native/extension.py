"""The compiled extension, imported when it is first needed: without it Octavo still imports."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from octavo.backends.batch import SAMPLING_RECORD
from octavo.errors import BackendUnavailable


def native_module() -> Any:
    """Returns the compiled extension; BackendUnavailable names the command that builds it."""
    try:
        native = importlib.import_module("octavo.backends.native._native")
    except ImportError as error:
        raise BackendUnavailable(
            f"the native backend is not built: {error}",
            hint=(
                "run `pip install .` in the source tree; --backend torch and --backend reference"
                " run without it"
            ),
        ) from error
    if np.dtype(native.SAMPLING_RECORD) != SAMPLING_RECORD:
        raise BackendUnavailable(
            "the native backend was built from other sources: its sampling record is"
            f" {native.SAMPLING_RECORD}, this source tree's is {SAMPLING_RECORD}",
            hint="run `pip install .` in the source tree again",
        )
    return native


def supported_levels() -> list[str]:
    """Returns the instruction-set levels that this machine runs, best last."""
    levels: list[str] = native_module().supported_levels()
    return levels
