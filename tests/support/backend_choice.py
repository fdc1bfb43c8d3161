"""The backend that `pytest --backend` names: the only one of those that tests have as a parameter,
and that of tests which name none.
"""

from __future__ import annotations

import os

BACKENDS = ["reference", "native", "torch"]
VARIABLE = "OCTAVO_TEST_BACKEND"


def chosen_backend(default: str) -> str:
    return os.environ.get(VARIABLE, default)


def backend_flags() -> list[str]:
    """For a command; [] where no backend is chosen."""
    chosen = os.environ.get(VARIABLE)
    return [] if chosen is None else [f"--backend={chosen}"]
