"""The backend of `pytest --backend`: the only one of tests with a backend parameter, and the
default of others.
"""

from __future__ import annotations

import os

BACKENDS = ["reference", "native", "torch"]
VARIABLE = "OCTAVO_TEST_BACKEND"


def chosen_backend(default: str) -> str:
    return os.environ.get(VARIABLE, default)


def backend_flags() -> list[str]:
    """Returns a command's backend flags; [] where no backend is chosen."""
    chosen = os.environ.get(VARIABLE)
    return [] if chosen is None else [f"--backend={chosen}"]
