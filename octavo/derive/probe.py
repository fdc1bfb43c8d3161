"""Lowers the regions between matmuls and attention: norms, activations, gates, rotations.

A node is lowered if the region between it and one or two earlier lowered nodes computes the same as
an op. Regions grow until they match an op or reach a matmul, an embedding or attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from octavo.derive.formulas import FAR_TOLERANCE, are_equal, evaluate
from octavo.derive.graph import FAR_POSITION, literals
from octavo.derive.regions import (
    draw,
    draw_parameters,
    find_combination,
    find_elementwise,
    find_norm,
    find_rope,
)
from octavo.derive.rows import RowMap
from octavo.derive.state import LoweringState
from octavo.program.ops import Act, ActMul, LayerNorm, Mul, RmsNorm, Scale, SoftCap
from octavo.program.program import Op, Value

MAX_REGION = 60
"""Maximum number of nodes of a probed region."""


class Prober:
    """Lowers nodes by comparing their regions with ops."""

    def __init__(self, state: LoweringState) -> None:
        self._state = state
        self._graph = state.graph
        self._emitter = state.emitter

    def probe(self, node: Node) -> None:
        """Lowers a node if the region between it and one or two earlier nodes computes the same as
        an op.
        """
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return
        frontier = self._state.inputs(node)
        if self._state.dead & frontier or self._state.num_tokens not in self._graph.shape(node):
            self._state.dead.add(node)
            return
        for _ in range(MAX_REGION):
            if not frontier or node in self._state.dead:
                return
            rows = [self._state.rows.get(each) for each in frontier]
            if len(frontier) <= 2 and all(map(self._emitter.can_read, rows)):
                inputs = sorted(frontier, key=self._graph.order.__getitem__)
                if len(inputs) == 1:
                    found = self._unary(node, inputs[0])
                else:
                    found = self._binary(node, inputs[0], inputs[1])
                if found:
                    return
            latest = self._state.latest(frontier)
            if latest is None:
                return
            frontier = frontier - {latest} | self._state.inputs(latest)

    def _unary(self, node: Node, source: Node) -> bool:
        rows: RowMap = self._state.rows[source]
        if self._graph.shape(node) != rows.shape:
            return False
        nodes, names = self._graph.cone(node, [source])
        shapes = {name: self._state.captured.shapes[name] for name in names}
        x, num_tokens = self._emitter.value_of(rows), self._state.num_tokens
        out = Value("out", "tokens", x.width)

        def region(values: Any, parameters: Any, *, is_far: bool = False) -> Any:
            given = {source: rows.tensor(values)}
            return rows.flat(self._graph.run(node, given, parameters, is_far=is_far))

        values, parameters = draw((num_tokens, x.width), 8), draw_parameters(shapes)
        near, far = region(values, parameters), region(values, parameters, is_far=True)
        other = torch.cat((values[:1] + 1.0, values[1:]))
        if not torch.equal(near[1:], region(other, parameters)[1:]):
            self._state.dead.add(node)
            return False
        op: Op | None = None
        if not are_equal(near, far):
            if not names:
                op = find_rope(region, x, out, rows.shape[-1], num_tokens)
            if op is not None:
                (rotated,) = evaluate(op, {x: values}, first_position=FAR_POSITION)
                op = op if are_equal(rotated, far, FAR_TOLERANCE) else None
        else:
            if not names:
                op = find_elementwise(region, x, out, num_tokens)
            op = op or find_norm(region, x, out, rows.shape[-1], shapes, [*literals(nodes)])
        if op is not None:
            self._emit(node, rows, op)
        return op is not None

    def _binary(self, node: Node, first: Node, second: Node) -> bool:
        a, b = self._state.rows[first], self._state.rows[second]
        if a.columns.numel() < b.columns.numel():
            a, b, first, second = b, a, second, first
        x, y = self._emitter.value_of(a), self._emitter.value_of(b)
        if self._graph.shape(node) != a.shape or self._graph.cone(node, [first, second])[1]:
            return False
        if b.shape not in (a.shape, (*a.shape[:-1], 1)):
            return False

        def region(one: Any, other: Any, *, is_far: bool = False) -> Any:
            given = {first: a.tensor(one), second: b.tensor(other)}
            return a.flat(self._graph.run(node, given, {}, is_far=is_far))

        num_tokens = self._state.num_tokens
        one, other = draw((num_tokens, x.width), 9), draw((num_tokens, y.width), 10)
        if not are_equal(region(one, other), region(one, other, is_far=True)):
            return False
        op = find_combination(region, x, y, Value("out", "tokens", x.width), num_tokens)
        if op is not None:
            self._emit(node, a, op)
        return op is not None

    def _emit(self, node: Node, like: RowMap, op: Op) -> None:
        """Appends the op of a node, whose output is a placeholder."""
        if isinstance(op, Scale) and op.factor == 1.0:
            self._state.rows[node] = like
            return
        (placeholder,) = op.outputs
        out = self._emitter.value(node.name, "tokens", placeholder.width)
        op = self._merge(self._with_weights(op).on({placeholder: out}))
        self._emitter.append(op)
        self._state.set_result(node, out, like.axis)

    def _with_weights(self, op: Op) -> Op:
        """Returns a norm whose parameters are replaced by the checkpoint's tensors."""
        if not isinstance(op, RmsNorm | LayerNorm) or op.weight.fill is not None:
            return op
        whole = self._state.weights.whole
        if isinstance(op, LayerNorm) and op.bias is not None:
            op = replace(op, bias=whole(op.bias.name))
        return replace(op, weight=whole(op.weight.name))

    def _merge(self, op: Op) -> Op:
        """Merges an op with the ops that produce its inputs: an activation into its gate, and the
        three parts of a soft cap.
        """
        makers = self._emitter.makers
        if isinstance(op, Mul) and op.a.width == op.b.width:
            for gate, up in ((op.a, op.b), (op.b, op.a)):
                maker = makers.get(gate)
                if isinstance(maker, Act):
                    return ActMul(maker.x, up, op.out, maker.activation)
        if isinstance(op, Scale):
            tanh = makers.get(op.x)
            inner = makers.get(tanh.x) if isinstance(tanh, Act) else None
            is_cap = isinstance(tanh, Act) and tanh.activation == "tanh"
            if is_cap and isinstance(inner, Scale) and abs(inner.factor * op.factor - 1) < 1e-12:
                return SoftCap(inner.x, op.out, op.factor)
        return op
