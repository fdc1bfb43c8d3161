"""What a section is told, and how long it has. Needs the standard library alone."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Emit = Callable[[Mapping[str, Any]], None]
"""Takes a row of the results."""


@dataclass(frozen=True)
class Ceilings:
    """The most that the device gives, as the first section measures it."""

    bandwidth: float
    """Bytes per second of a large copy, read and written ones together."""
    bf16: float
    """Operations per second of a large product."""
    fp8: float | None = None


@dataclass(frozen=True)
class Settings:
    """`tiny`: shapes that a CPU computes in seconds. `end`: on time.time()'s clock, when the
    section is to be through.
    """

    device: str
    tiny: bool
    end: float
    ceilings: Ceilings | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the engine, in place of the usual ones."""

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
    """What fails leaves its traceback in the results, and lets the others go on."""
    try:
        run()
    except Exception:
        emit({"what": what, "failed": traceback.format_exc()})
