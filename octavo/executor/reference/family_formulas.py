"""Reference formulas of ops that few model families use, in float64; `FAMILY_FORMULAS` is the
dispatch table. `program/family_ops.py` states the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.executor.reference.step import Made, ReferenceStep
from octavo.program import family_ops
from octavo.program.program import Op


def match_magnitude(op: family_ops.MatchMagnitude, step: ReferenceStep) -> Made:
    own, its = (np.square(step.get(value)).mean(axis=1, keepdims=True) for value in (op.x, op.like))
    return (step.get(op.x) * np.sqrt(its / np.maximum(own, op.least)),)


def keep_largest(op: family_ops.KeepLargest, step: ReferenceStep) -> Made:
    x = step.get(op.x)
    cutoff = x.mean(axis=1, keepdims=True) + op.deviations * x.std(axis=1, keepdims=True)
    return (np.maximum(x - cutoff, 0),)


def concat(op: family_ops.Concat, step: ReferenceStep) -> Made:
    return (np.concatenate([step.get(x) for x in op.xs], axis=1),)


def columns(op: family_ops.SelectColumns, step: ReferenceStep) -> Made:
    return (step.get(op.x)[:, op.start : op.start + op.out.width],)


def xielu(op: family_ops.Xielu, step: ReferenceStep) -> Made:
    x, weights = step.get(op.x), step.weights
    beta, positive = weights[op.beta], np.logaddexp(weights[op.alpha_p], 0.0)
    negative = beta + np.logaddexp(weights[op.alpha_n], 0.0)
    low = negative * (np.expm1(np.minimum(x, weights[op.eps])) - x)
    return (np.where(x > 0, positive * x * x, low) + beta * x,)


def mix(op: family_ops.Mix, step: ReferenceStep) -> Made:
    xs, coefs = [step.get(x) for x in op.xs], step.get(op.coefs) + op.offset
    mixed = []
    for i, base in enumerate(op.bases):
        total = step.get(base)
        for k, x in enumerate(xs):
            total = total + coefs[:, [i * len(xs) + k]] * x
        mixed.append(total)
    return tuple(mixed)


FAMILY_FORMULAS: dict[type[Op], Callable[[Any, ReferenceStep], Made]] = {
    family_ops.MatchMagnitude: match_magnitude,
    family_ops.KeepLargest: keep_largest,
    family_ops.Concat: concat,
    family_ops.SelectColumns: columns,
    family_ops.Xielu: xielu,
    family_ops.Mix: mix,
}
