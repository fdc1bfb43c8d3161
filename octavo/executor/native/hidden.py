"""Ops that pass hidden states between pipeline stages: they copy rows between the arena and a
step's arrays.

A Program lists hidden states only as inputs and outputs; these ops exist only during lowering.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.program.program import Op, Program, Value


@dataclass(frozen=True, slots=True)
class HiddenIn(Op):
    """Reads `StepBatch.hidden` into `out [T, W]`."""

    out: Value


@dataclass(frozen=True, slots=True)
class HiddenOut(Op):
    """Writes `x [T, W]` to the step's array "hidden"."""

    x: Value


def with_hidden(program: Program) -> Program:
    """Returns the Program with an op for each hidden input and output."""
    hidden_in, hidden_out = program.inputs.get("hidden"), program.outputs.get("hidden")
    first = () if hidden_in is None else (HiddenIn(hidden_in),)
    last = () if hidden_out is None else (HiddenOut(hidden_out),)
    if not first and not last:
        return program
    inputs = {name: value for name, value in program.inputs.items() if name != "hidden"}
    return replace(program, inputs=inputs, ops=(*first, *program.ops, *last))
