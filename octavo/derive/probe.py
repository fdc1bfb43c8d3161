"""Lowers the regions between matmuls and attention: norms, activations, gates, rotations.

A node is lowered if the region between it and one or two earlier lowered nodes is something that
Programs have. Regions grow until that is so, or until they reach a matmul, an embedding or
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from octavo.derive.curves import Curve, are_equal
from octavo.derive.emitter import LoweringState
from octavo.derive.graph import FAR_POSITION, literals
from octavo.derive.regions import (
    NormRegion,
    Rotation,
    draw,
    draw_parameters,
    find_curve,
    find_gate,
    find_norm,
    find_rotation,
    rotate,
    with_other_row,
)
from octavo.derive.rows import RowMap
from octavo.program.ops import (
    Act,
    ActMul,
    Add,
    Clip,
    LayerNorm,
    Mul,
    RmsNorm,
    Rope,
    RopeTable,
    Scale,
    SoftCap,
)
from octavo.program.program import Op, Value, Weight

MAX_REGION = 60
"""Nodes of the largest region that is probed."""


class Prober:
    """Lowers nodes by what their regions compute."""

    def __init__(self, state: LoweringState) -> None:
        self._state = state
        self._graph = state.graph
        self._emitter = state.emitter
        self._rows = state.rows

    def probe(self, node: Node) -> None:
        """Lowers a node if the region between it and one or two earlier nodes is an op."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return
        frontier = self._state.inputs(node)
        if self._state.dead & frontier or self._state.num_tokens not in self._graph.shape(node):
            self._state.dead.add(node)
            return
        for _ in range(MAX_REGION):
            if not frontier or node in self._state.dead:
                return
            rows = [self._rows.get(each) for each in frontier]
            if len(frontier) <= 2 and all(map(self._emitter.can_read, rows)):
                inputs = sorted(frontier, key=self._graph.order.__getitem__)
                found = (
                    self._unary(node, inputs[0])
                    if len(inputs) == 1
                    else self._binary(node, inputs[0], inputs[1])
                )
                if found:
                    return
            latest = self._state.latest(frontier)
            if latest is None:
                return
            frontier = frontier - {latest} | self._state.inputs(latest)

    def _unary(self, node: Node, source: Node) -> bool:
        rows: RowMap = self._rows[source]
        shape = rows.shape
        if self._graph.shape(node) != shape:
            return False
        nodes, names = self._graph.cone(node, [source])
        shapes = {name: self._state.captured.shapes[name] for name in names}

        def region(x: Any, parameters: Any) -> Any:
            return self._graph.run(node, {source: x}, parameters)

        x = draw(shape, 8)
        values = draw_parameters(shapes)
        near = region(x, values)
        if self._mixes(near, region(with_other_row(x, rows.axis), values), rows.axis):
            self._state.dead.add(node)
            return False
        far = self._graph.run(node, {source: x}, values, is_far=True)
        if not are_equal(far, near):
            rotation = None if names else find_rotation(region, shape, rows.axis)
            if rotation is None or not are_equal(
                far, rotate(rotation, x, rows.axis, first=FAR_POSITION)
            ):
                return False
            self._emit_rotation(node, rows, rotation)
            return True
        curve = None if names else find_curve(region, shape)
        if curve is not None:
            self._emit_curve(node, rows, curve)
            return True
        norm = find_norm(region, shape, shapes, [*literals(nodes)])
        if norm is not None:
            self._emit_norm(node, rows, norm)
        return norm is not None

    def _mixes(self, before: Any, after: Any, axis: int) -> bool:
        """Whether rows changed, other than the first, which had another input."""
        count = self._state.num_tokens - 1
        return not torch.equal(before.narrow(axis, 1, count), after.narrow(axis, 1, count))

    def _binary(self, node: Node, first: Node, second: Node) -> bool:
        a, b = self._rows[first], self._rows[second]
        if a.columns.numel() < b.columns.numel():
            a, b, first, second = b, a, second, first
        if self._graph.shape(node) != a.shape or self._graph.cone(node, [first, second])[1]:
            return False

        def region(x: Any, y: Any, *, is_far: bool = False) -> Any:
            return self._graph.run(node, {first: x, second: y}, {}, is_far=is_far)

        x, y = draw(a.shape, 9), draw(b.shape, 10)
        near = region(x, y)
        if not are_equal(near, region(x, y, is_far=True)):
            return False
        one, other = self._emitter.value_of(a), self._emitter.value_of(b)
        if a.shape == b.shape and torch.equal(near, x + y):
            self._emit(node, a, lambda out: Add(one, other, out))
            return True
        if other.width not in (1, one.width):
            return False
        return self._gate(node, region, (a, b))

    def _gate(self, node: Node, region: Callable[..., Any], rows: tuple[RowMap, RowMap]) -> bool:
        found = find_gate(region, rows[0].shape, rows[1].shape)
        if found is None:
            return False
        curve, swapped = found
        gate, up = map(self._emitter.value_of, rows[::-1] if swapped else rows)
        if curve is None:
            self._emit(node, rows[0], lambda out: self._multiply(gate, up, out))
        elif curve.activation is not None:
            activation = curve.activation
            self._emit(node, rows[0], lambda out: ActMul(gate, up, out, activation))
        return curve is None or curve.activation is not None

    def _multiply(self, a: Value, b: Value, out: Value) -> Op:
        """Returns a product, gated if one factor is an activation."""
        for gate, up in ((a, b), (b, a)):
            maker = self._emitter.makers.get(gate)
            if isinstance(maker, Act) and up.width == gate.width:
                return ActMul(maker.x, up, out, maker.activation)
        return Mul(a, b, out)

    def _emit_curve(self, node: Node, rows: RowMap, curve: Curve) -> None:
        x = self._emitter.value_of(rows)
        if curve.factor == 1.0:
            self._rows[node] = rows
        elif curve.activation is not None:
            activation = curve.activation
            self._emit(node, rows, lambda out: Act(x, out, activation))
        elif curve.factor is not None:
            self._emit(node, rows, self._scaled(x, curve.factor))
        elif curve.cap is not None:
            cap = curve.cap
            self._emit(node, rows, lambda out: SoftCap(x, out, cap))
        else:
            assert curve.limit is not None
            limit = curve.limit
            self._emit(node, rows, lambda out: Clip(x, out, limit))

    def _scaled(self, x: Value, factor: float) -> Callable[[Value], Op]:
        """Returns a Scale, or the soft cap of which it is the last part."""
        makers = self._emitter.makers
        tanh = makers.get(x)
        if isinstance(tanh, Act) and tanh.activation == "tanh":
            inner = makers.get(tanh.x)
            if isinstance(inner, Scale) and abs(inner.factor * factor - 1) < 1e-12:
                return lambda out: SoftCap(inner.x, out, factor)
        return lambda out: Scale(x, out, factor)

    def _emit_norm(self, node: Node, rows: RowMap, norm: NormRegion) -> None:
        x, width = self._emitter.value_of(rows), rows.shape[-1]
        weight = (
            self._state.weights.whole(norm.weight)
            if norm.weight
            else Weight("norm", (width,), fill=norm.offset)
        )
        offset = norm.offset if norm.weight else 0.0
        group = width if x.width != width else 0
        if norm.centered:
            bias = self._state.weights.whole(norm.bias) if norm.bias else None
            self._emit(
                node,
                rows,
                lambda out: LayerNorm(x, out, weight, bias, norm.eps, offset, group_width=group),
            )
        else:
            self._emit(node, rows, lambda out: RmsNorm(x, out, weight, norm.eps, offset, group))

    def _emit_rotation(self, node: Node, rows: RowMap, rotation: Rotation) -> None:
        x, width = self._emitter.value_of(rows), rows.shape[-1]
        table = RopeTable(rotation.inv_freq, rotation.mscale)
        self._emit(
            node,
            rows,
            lambda out: Rope(
                x,
                out,
                num_heads=x.width // width,
                head_width=width,
                rotary_dim=rotation.width,
                rotary_start=rotation.start,
                table=table,
                style=rotation.style,
            ),
        )

    def _emit(self, node: Node, like: RowMap, make: Callable[[Value], Op]) -> None:
        out = self._emitter.value(node.name, like.columns.numel())
        self._emitter.append(make(out))
        self._state.set_result(node, out, like.axis)
