"""Evaluates single ops on arrays with the formulas of the reference backend, in float64.

Every backend's ops are tested against these formulas, so a derived op has the same meaning as an
executed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from octavo.executor.reference.backend import FORMULAS
from octavo.executor.reference.step import ReferenceStep
from octavo.program.program import Op, Program, Value, Weight
from octavo.worker.calibration import make_prompt_batch

TOLERANCE = 1e-9
"""Maximum difference at which two formulas count as equal, relative to their values, in float64."""

FAR_TOLERANCE = 1e-7
"""The same tolerance far from the first position, where angles have fewer exact digits."""


def evaluate(
    op: Op,
    inputs: Mapping[Value, Any],
    weights: Mapping[Weight, Any] | None = None,
    *,
    first_position: int = 0,
) -> list[Any]:
    """Returns the outputs of an op for inputs `[T, W]` at consecutive positions."""
    num_tokens = len(next(iter(inputs.values())))
    tokens = np.zeros(num_tokens, np.int32)
    batch = make_prompt_batch(tokens, 0, num_axes=1, first_position=first_position)
    arrays = {weight: array.numpy() for weight, array in (weights or {}).items()}
    step = ReferenceStep(Program("op", {}, {}, (op,)), arrays, batch, [])
    step.values = {value.name: array.numpy() for value, array in inputs.items()}
    with np.errstate(all="ignore"):
        return [torch.from_numpy(np.ascontiguousarray(y)) for y in FORMULAS[type(op)](op, step)]


def are_equal(a: Any, b: Any, tolerance: float = TOLERANCE) -> bool:
    """Returns whether two arrays are equal up to float64 rounding."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() and b.is_floating_point()):
        return torch.equal(a, b)
    if not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
        return False
    return bool(((a - b).abs() <= tolerance * (1e-3 + torch.maximum(a.abs(), b.abs()))).all())
