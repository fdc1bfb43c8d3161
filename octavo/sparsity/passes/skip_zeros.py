"""Skip_zeros pass: marks matmuls with mostly zero inputs, so that a backend can skip the weights.

Zeros come from relu and relu2; results do not change. Source of the idea: Mirzadeh et al. 2023
(arXiv 2310.04564).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import ConfigError
from octavo.program.ops import Act, ActMul, Linear
from octavo.program.program import Op, Program

ZEROING = ("relu", "relu2")
"""Activations that map all negative numbers to zero."""


def skip_zeros(program: Program) -> Program:
    """Marks the matmuls of a fused Program; raises ConfigError if none has such inputs."""
    makers = {value: op for op in program.ops for value in op.outputs}
    activations = {_get_activation(op) for op in program.ops} - {None}
    ops = tuple(
        replace(op, skips_zeros=True)
        if isinstance(op, Linear)
        and op.norm is None
        and op.x in makers
        and _get_activation(makers[op.x]) in ZEROING
        else op
        for op in program.ops
    )
    if ops == program.ops:
        listed = ", ".join(sorted(str(activation) for activation in activations)) or "no activation"
        raise ConfigError(
            "ffn_sparsity: exact requires feed-forward layers with the activation"
            f" {' or '.join(ZEROING)}, {program.name} has {listed}",
            hint="remove ffn_sparsity",
        )
    return replace(program, ops=ops)


def _get_activation(op: Op) -> str | None:
    """Returns the activation applied to an op's outputs; None if there is none."""
    if isinstance(op, Linear):
        return op.activation if op.gate is None else op.gate.activation
    return op.activation if isinstance(op, Act | ActMul) else None
