"""Fuse pass: fewer, larger ops with the same results up to rounding.

Merges Linears that read the same rows (q + k + v, gate + up), and folds into a Linear the preceding
norm, the following activation or gate, and the residual sum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from octavo.program.ops import Act, ActMul, Add, Gate, LayerNorm, Linear, PreNorm, RmsNorm
from octavo.program.program import Op, Program, Value


def fuse(program: Program) -> Program:
    """Applies all rewrites."""
    ops: list[Op] = list(program.ops)
    for rewrite in (_merge_linears, _fold_activations, _fold_gates, _fold_norms, _fold_residuals):
        ops = rewrite(ops, _Uses(ops, program))
    fused = replace(program, ops=tuple(ops))
    fused.check()
    return fused


class _Uses:
    """Producers and readers of each Value, by op index."""

    def __init__(self, ops: list[Op], program: Program) -> None:
        self.maker = {value: index for index, op in enumerate(ops) for value in op.outputs}
        self.reads = Counter(value for op in ops for value in op.inputs)
        self.reads.update(program.outputs.values())
        self.reader = {value: index for index, op in enumerate(ops) for value in op.inputs}

    def read_once_by(self, value: Value) -> int | None:
        """Returns the index of the only op that reads the Value, or None."""
        return self.reader.get(value) if self.reads[value] == 1 else None


def _is_plain(op: Op) -> bool:
    return (
        isinstance(op, Linear)
        and op.activation is None
        and op.residual is None
        and op.gate is None
        and op.norm is None
    )


def _merge_linears(ops: list[Op], uses: _Uses) -> list[Op]:
    """Merges plain Linears with the same x and threshold into the first of them."""
    merged: dict[tuple[Value, float], Linear] = {}
    for op in ops:
        if isinstance(op, Linear) and _is_plain(op):
            first = merged.get((op.x, op.threshold))
            merged[op.x, op.threshold] = op if first is None else _concatenate(first, op)
    result, placed = [], set()
    for op in ops:
        if not isinstance(op, Linear) or not _is_plain(op):
            result.append(op)
        elif (op.x, op.threshold) not in placed:
            placed.add((op.x, op.threshold))
            result.append(merged[op.x, op.threshold])
    return result


def _concatenate(a: Linear, b: Linear) -> Linear:
    biases = (a.biases or (None,) * len(a.weights_)) + (b.biases or (None,) * len(b.weights_))
    return replace(
        a,
        outs=a.outs + b.outs,
        weights_=a.weights_ + b.weights_,
        sites=a.sites + b.sites,
        biases=biases if any(biases) else (),
    )


def _fold_activations(ops: list[Op], uses: _Uses) -> list[Op]:
    """Folds Act into the Linear whose only output it reads."""
    result = list(ops)
    gone: set[int] = set()
    for index, op in enumerate(ops):
        if not isinstance(op, Act):
            continue
        source = uses.maker.get(op.x)
        linear = ops[source] if source is not None else None
        if (
            source is None
            or not isinstance(linear, Linear)
            or not _is_plain(linear)
            or linear.outs != (op.x,)
            or uses.read_once_by(op.x) != index
        ):
            continue
        result[source] = replace(linear, outs=(op.out,), activation=op.activation)
        gone.add(index)
    return [op for index, op in enumerate(result) if index not in gone]


def _fold_gates(ops: list[Op], uses: _Uses) -> list[Op]:
    """Folds ActMul into the Linear whose two outputs it reads."""
    result = list(ops)
    gone: set[int] = set()
    for index, op in enumerate(ops):
        if not isinstance(op, ActMul):
            continue
        source = uses.maker.get(op.gate)
        linear = ops[source] if source is not None else None
        if (
            source is None
            or not isinstance(linear, Linear)
            or linear.outs != (op.gate, op.up)
            or len(linear.weights_) != 2
            or any(uses.read_once_by(value) != index for value in linear.outs)
            or (op.scores is not None and uses.maker[op.scores] >= source)
        ):
            continue
        gate = Gate(op.activation, op.clamp, op.alpha, op.up_offset, op.threshold)
        result[source] = replace(linear, outs=(op.out,), gate=gate, scores=op.scores)
        gone.add(index)
    return [op for index, op in enumerate(result) if index not in gone]


def _fold_norms(ops: list[Op], uses: _Uses) -> list[Op]:
    """Folds a full-row norm into the only Linear that reads it."""
    result = list(ops)
    gone: set[int] = set()
    for index, op in enumerate(ops):
        if not isinstance(op, RmsNorm | LayerNorm) or op.group_width not in (0, op.x.width):
            continue
        reader = uses.read_once_by(op.out)
        linear = result[reader] if reader is not None else None
        if reader is None or not isinstance(linear, Linear) or linear.x != op.out:
            continue
        if isinstance(op, RmsNorm):
            norm = PreNorm(op.weight, op.eps, weight_offset=op.weight_offset)
        else:
            norm = PreNorm(op.weight, op.eps, op.bias, op.weight_offset, centered=True)
        result[reader] = replace(linear, x=op.x, norm=norm)
        gone.add(index)
    return [op for index, op in enumerate(result) if index not in gone]


def _fold_residuals(ops: list[Op], uses: _Uses) -> list[Op]:
    """Folds a sum into a Linear's residual if one side is the Linear's only output and the other is
    computed earlier.
    """
    result = list(ops)
    gone: set[int] = set()
    for index, op in enumerate(ops):
        if not isinstance(op, Add):
            continue
        for mine, other in ((op.a, op.b), (op.b, op.a)):
            source = uses.maker.get(mine)
            linear = result[source] if source is not None else None
            foldable = (
                isinstance(linear, Linear) and linear.outs == (mine,) and linear.residual is None
            )
            if (
                source is None
                or not foldable
                or uses.read_once_by(mine) != index
                or uses.maker.get(other, -1) >= source
            ):
                continue
            assert isinstance(linear, Linear)
            result[source] = replace(linear, outs=(op.out,), residual=other)
            gone.add(index)
            break
    return [op for index, op in enumerate(result) if index not in gone]
