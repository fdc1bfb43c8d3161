"""Matmuls with some rows of a checkpoint's matrix, for modules that stack several projections."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.program.builder import Builder
from octavo.program.program import Value, Weight


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a checkpoint's tensor: `run` of every `step`, starting at `start`, `width` in
    total.
    """

    width: int
    total: int
    """Rows of the tensor."""
    start: int = 0
    step: int = 1
    run: int = 1


def linear_part(b: Builder, x: Value, module: str, rows: Rows, *, bias: bool = False) -> Value:
    """Appends a matmul with some rows of a module's matrix."""
    picked = (False, rows.total, rows.start, rows.step, rows.run)
    weight = Weight(f"{module}.weight", (rows.width, x.width), (), *picked)
    added = Weight(f"{module}.bias", (rows.width,), (), *picked) if bias else None
    return b.linear_from(x, weight, added, name=module)
