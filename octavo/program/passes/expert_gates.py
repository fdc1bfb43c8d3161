"""Folds expert gates: two expert matmuls and an ActMul become one op, as do one matmul and an Act.

For backends that compute gate and up together; runs after fuse, which does the same for dense
layers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import Act, ActMul, Gate
from octavo.program.program import Op, Program, Value


def fold_expert_gates(program: Program) -> Program:
    """Folds each ActMul of two expert matmuls over the same rows, and each Act of one, into one
    op.
    """
    reads = Counter(value for op in program.ops for value in op.inputs)
    makers: dict[Value, GroupedLinear] = {
        op.out: op for op in program.ops if isinstance(op, GroupedLinear) and reads[op.out] == 1
    }
    folded: list[Op] = []
    for op in program.ops:
        if isinstance(op, ActMul) and (one := _fold(op, makers)) is not None:
            folded = [
                folded_op for folded_op in folded if {op.gate, op.up}.isdisjoint(folded_op.outputs)
            ]
            folded.append(one)
        elif isinstance(op, Act) and (maker := makers.get(op.x)) is not None:
            folded = [folded_op for folded_op in folded if op.x not in folded_op.outputs]
            folded.append(replace(maker, out=op.out, activation=op.activation))
        else:
            folded.append(op)
    result = replace(program, ops=tuple(folded))
    result.check()
    return result


def _fold(act: ActMul, makers: dict[Value, GroupedLinear]) -> GroupedLinear | None:
    gate, up = makers.get(act.gate), makers.get(act.up)
    if gate is None or up is None or (gate.x, gate.ids) != (up.x, up.ids):
        return None
    if gate.weight.shape != up.weight.shape or gate.gate is not None or up.gate is not None:
        return None
    return replace(
        gate,
        out=act.out,
        up=up.weight,
        up_bias=up.bias,
        gate=Gate(act.activation, act.clamp, act.alpha, act.up_offset),
    )
