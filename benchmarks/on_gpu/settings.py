"""The settings that a section gets, and its time limit. Needs the standard library alone."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""The tree that is measured."""

Emit = Callable[[Mapping[str, Any]], None]
"""Takes a row of the results."""


@dataclass(frozen=True)
class Ceilings:
    """Upper bounds on the device's speed, as the first section measures them."""

    bandwidth: float
    """Bytes per second of a large copy, reads and writes together."""
    bf16: float
    """Operations per second of a large bf16 product."""
    fp8: float | None = None


@dataclass(frozen=True)
class Settings:
    """The settings of one section."""

    device: str
    tiny: bool
    """Whether shapes are small enough for a CPU to compute them in seconds."""
    end: float
    """Time by `time.time()` at which the section must have ended."""
    ceilings: Ceilings | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Engine options that replace the usual ones."""

    @property
    def left_s(self) -> float:
        return self.end - time.time()

    def need_ceilings(self) -> Ceilings:
        if self.ceilings is None:
            raise RuntimeError("no ceilings were measured; run the section `ceilings`, too")
        return self.ceilings

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> Settings:
        values = json.loads(text)
        ceilings = values.pop("ceilings")
        return Settings(**values, ceilings=None if ceilings is None else Ceilings(**ceilings))


def attempt(emit: Emit, what: str, run: Callable[[], object]) -> None:
    """Runs a part of a section; a failure leaves its traceback in the results, and the other parts
    go on.
    """
    try:
        run()
    except Exception:
        emit({"what": what, "failed": traceback.format_exc()})


def python_path() -> str:
    """Returns a PYTHONPATH that begins with this tree, for processes of its own."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
