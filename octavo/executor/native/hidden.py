"""Ops by which the native executor takes hidden states from one stage of a model and hands them to
the next: they copy rows between its arena and a step's arrays.

A Program names hidden states among its inputs and outputs; these ops stand only in what is lowered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.program.program import Op, Program, Value


@dataclass(frozen=True, slots=True)
class HiddenIn(Op):
    """Rows of `StepBatch.hidden`, `out [T, W]`."""

    out: Value


@dataclass(frozen=True, slots=True)
class HiddenOut(Op):
    """Rows for the step's array "hidden", `x [T, W]`."""

    x: Value


def with_hidden(program: Program) -> Program:
    """Returns the Program with an op for each hidden input and output."""
    taken, made = program.inputs.get("hidden"), program.outputs.get("hidden")
    first = () if taken is None else (HiddenIn(taken),)
    last = () if made is None else (HiddenOut(made),)
    if not first and not last:
        return program
    inputs = {name: value for name, value in program.inputs.items() if name != "hidden"}
    return replace(program, inputs=inputs, ops=(*first, *program.ops, *last))
