"""Lazy import of the compiled extension, so that octavo imports without it.

In a source tree, an extension built from different sources is rejected: its functions and structs
may not match this package.
"""

from __future__ import annotations

import hashlib
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from octavo.api.errors import BackendUnavailable
from octavo.executor.batch import SAMPLING_RECORD

SOURCES = Path(__file__).parents[3] / "csrc"
"""The extension's sources; missing in an installed package."""
ROOMS = {
    "bindings": (".cpp", ".h"),
    "kernels": (".cpp", ".h", ".inl"),
    "plan": (".cpp", ".h"),
    "runtime": (".cpp", ".h"),
    "simd": (".h",),
}
"""Source folders that the extension is built from, with their file suffixes."""


def native_module() -> Any:
    """Returns the compiled extension; raises BackendUnavailable with the build command."""
    try:
        native = importlib.import_module("octavo.executor.native._native")
    except ImportError as error:
        raise BackendUnavailable(
            f"the native backend is not built: {error}",
            hint=(
                "run `pip install .` in the source tree; --backend torch and --backend reference"
                " do not require it"
            ),
        ) from error
    expected = source_digest(SOURCES) if SOURCES.is_dir() else None
    if expected is not None and getattr(native, "SOURCE_DIGEST", None) != expected:
        raise BackendUnavailable(
            f"the native backend was built from a different version of the sources in {SOURCES}",
            hint="rebuild it: `make .venv-dev/.stamp` for an editable install, else `pip install"
            " .`",
        )
    if np.dtype(native.SAMPLING_RECORD) != SAMPLING_RECORD:
        raise BackendUnavailable(
            "the native backend was built from different sources: its sampling record is"
            f" {native.SAMPLING_RECORD}, this package's is {SAMPLING_RECORD}",
            hint="run `pip install .` in the source tree again",
        )
    return native


@cache
def source_digest(sources: Path) -> str:
    """Returns the SHA-256 of the sources' names and contents, as csrc/digest.cmake computes it."""
    names = sorted(
        path.relative_to(sources).as_posix()
        for room, suffixes in ROOMS.items()
        for path in (sources / room).iterdir()
        if path.suffix in suffixes
    )
    digests = (hashlib.sha256((sources / name).read_bytes()).hexdigest() for name in names)
    lines = "".join(f"{digest} {name}\n" for digest, name in zip(digests, names, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def supported_levels() -> list[str]:
    levels: list[str] = native_module().supported_levels()
    return levels
