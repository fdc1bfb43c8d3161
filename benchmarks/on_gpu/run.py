"""A section's own process: `python -m benchmarks.on_gpu.run NAME SETTINGS` prints a line `RESULT
{...}` for each row.

Each section has a process because a fault of a device ends everything that its process computes
with it.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from benchmarks.on_gpu.settings import Settings

PREFIX = "RESULT "

FUNCTIONS = {
    "ceilings": "ceilings:section",
    "ops": "ops:section",
    "kernel tests": "kernel_tests:section",
    "tokens": "tokens:section",
    "invariance": "tokens:invariance",
    "engine": "engine:plain",
    "engine, 4-bit": "engine:four_bits",
    "kernels": "kernels:section",
    "products": "products:section",
    "offline": "offline:section",
    "drafts, adapter": "offline:extras",
    "smollm2": "served:smollm2",
    "served": "served:section",
    "transformers": "peers:section",
}
"""Module and function of each section, by the section's name."""


def main() -> int:
    name, settings = sys.argv[1], Settings.of_json(sys.argv[2])

    def emit(row: Mapping[str, Any]) -> None:
        print(PREFIX + json.dumps({"section": name, **row}), flush=True)

    module, function = FUNCTIONS[name].split(":")
    try:
        getattr(import_module(f"benchmarks.on_gpu.{module}"), function)(settings, emit)
    except BaseException:
        emit({"failed": traceback.format_exc()})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
