"""Sparsify pass: zero matmul inputs and gates below a threshold in generated rows.

Sets `Linear.threshold` and `ActMul.threshold` without adding ops, so fusion is unchanged. Runs
before the fuse pass and after the adapters pass. Sources: TEAL (Liu et al. 2024, arXiv 2408.14690),
CATS (Lee et al. 2024, arXiv 2404.08763).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from octavo.api.errors import ConfigError
from octavo.program.ops import ActMul, Linear
from octavo.program.program import Op, Program, Value


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Magnitudes below which activations are zeroed."""

    inputs: Mapping[str, float] = field(default_factory=dict)
    """Thresholds of matmul inputs, by matrix name."""
    gates: Mapping[str, float] = field(default_factory=dict)
    """Thresholds of f(gate), by the first matrix that computes the gate."""


def sparsify(program: Program, thresholds: Thresholds) -> Program:
    """Returns the Program with thresholds; raises ConfigError if one does not apply to it."""
    makers = {value: op for op in program.ops for value in op.outputs}
    cut: set[Value] = set()
    """Values that thresholds zero."""
    placed: set[str] = set()
    ops: list[Op] = []
    for op in program.ops:
        changed = _with_threshold(op, makers, thresholds)
        placed |= _names(changed, makers)
        if isinstance(changed, ActMul) and changed.threshold:
            cut.add(changed.out)
        if isinstance(changed, Linear) and (changed.threshold or changed.x in cut):
            changed = replace(changed, skips_zeros=True)
        ops.append(changed)
    for name in (*thresholds.inputs, *thresholds.gates):
        if name not in placed:
            raise ConfigError(
                f"calibration: the file has a threshold for {name}, which is no matmul weight of"
                f" {program.name}",
                hint="calibrate this model: octavo calibrate MODEL --text FILE --out FILE",
            )
    result = replace(program, ops=tuple(ops))
    result.check()
    return result


def get_gate_name(op: ActMul, makers: Mapping[Value, Op]) -> str | None:
    """Returns the name of the first matrix that computes an op's gate; None if no matmul does."""
    maker = makers.get(op.gate)
    return maker.weights_[0].name if isinstance(maker, Linear) else None


def _with_threshold(op: Op, makers: Mapping[Value, Op], thresholds: Thresholds) -> Op:
    if isinstance(op, Linear) and op.x.axis == "tokens":
        values = {thresholds.inputs.get(weight.name, 0.0) for weight in op.weights_}
        assert len(values) == 1, "matrices of one product have one input"
        (threshold,) = values
        return replace(op, threshold=threshold) if threshold else op
    if isinstance(op, ActMul):
        threshold = thresholds.gates.get(get_gate_name(op, makers) or "", 0.0)
        return replace(op, threshold=threshold) if threshold else op
    return op


def _names(op: Op, makers: Mapping[Value, Op]) -> set[str]:
    """Returns the names under which an op can have a threshold."""
    if isinstance(op, Linear) and op.x.axis == "tokens":
        return {weight.name for weight in op.weights_}
    return {get_gate_name(op, makers) or ""} if isinstance(op, ActMul) else set()
