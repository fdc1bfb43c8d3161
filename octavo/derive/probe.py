"""Lowers the regions between matmuls and attention: norms, activations, gates, rotations.

A node is lowered if the region between it and one or two earlier lowered nodes computes the same as
an op. Regions grow until they match an op or reach a matmul, an embedding or attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from octavo.derive.formulas import FAR_TOLERANCE, are_equal, evaluate
from octavo.derive.graph import literals
from octavo.derive.regions import (
    Region,
    draw,
    draw_parameters,
    find_combination,
    find_elementwise,
    find_growth,
    find_norm,
    find_rope,
    find_sinusoids,
    find_xielu,
    numbers_in,
)
from octavo.derive.rows import RowMap
from octavo.derive.state import LoweringState
from octavo.program.family_ops import Xielu
from octavo.program.ops import Act, ActMul, Add, Embedding, LayerNorm, Mul, RmsNorm, Scale, SoftCap
from octavo.program.program import Op, Value, Weight

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
        order = None
        """Order of a head's columns in the op, if it differs from the graph's."""
        if not are_equal(near, far):
            if not names:
                width = rows.shape[-1]
                op = find_rope(region, x, out, width, num_tokens)
                if op is None and width % 2 == 0:  # pairs in, halves out
                    order = torch.arange(width).reshape(2, -1).T.reshape(-1)
                    turned = partial(_arranged_region, region, width, order)
                    op = find_rope(turned, x, out, width, num_tokens)
                    far = _arrange(far, width, order)
            if op is not None:
                (rotated,) = evaluate(op, {x: values}, first_position=self._graph.far_position)
                op = op if are_equal(rotated, far, FAR_TOLERANCE) else None
            elif not names and (
                self._with_sinusoids(node, rows, x, region)
                or self._with_growth(node, rows, x, region)
            ):
                return True
        else:
            if not names:
                op = find_elementwise(region, x, out, num_tokens)
            elif len(names) == 1 and self._with_vector(node, names[0], rows, x, region):
                return True
            op = op or find_norm(region, x, out, rows.shape[-1], shapes, [*literals(nodes)])
            op = op or find_xielu(region, x, out, shapes)
        if op is not None:
            self._emit(node, rows, op)
        if op is not None and order is not None:
            found = self._state.rows[node]
            indices = order.argsort()
            self._state.rows[node] = replace(found, columns=found.columns[..., indices])
        return op is not None

    def _with_sinusoids(self, node: Node, rows: RowMap, x: Value, region: Region) -> bool:
        """Lowers the sum of rows and a table of sines and cosines."""
        values = draw((self._state.num_tokens, x.width), 12)
        table = region(values, {}) - values
        far = region(values, {}, is_far=True) - values  # type: ignore[call-arg]
        if not are_equal(region(values * 2, {}) - values * 2, table, FAR_TOLERANCE):
            return False
        found = find_sinusoids(table, far, self._graph.far_position)
        if found is None:
            return False
        fill, offset = found
        count = self._state.captured.max_positions + offset
        weight = Weight(f"{node.name}.sinusoids", (count, x.width), fill=fill)
        row = self._emitter.value("sinusoids", "tokens", x.width)
        self._emitter.append(Embedding(row, weight, by_position=True, offset=offset))
        self._emit(node, rows, Add(x, row, Value("out", "tokens", x.width)))
        return True

    def _with_growth(self, node: Node, rows: RowMap, x: Value, region: Region) -> bool:
        """Lowers rows times a factor that grows with their position."""
        values = draw((self._state.num_tokens, x.width), 13)
        near = region(values, {}) / values
        far = region(values, {}, is_far=True) / values  # type: ignore[call-arg]
        found = find_growth(near, far, self._graph.far_position, numbers_in(self._state.config))
        if found is None:
            return False
        weight = Weight("query_growth", (self._state.captured.max_positions, 1), fill=found)
        row = self._emitter.value("growth", "tokens", 1)
        self._emitter.append(Embedding(row, weight, by_position=True))
        self._emit(node, rows, Mul(x, row, Value("out", "tokens", x.width)))
        return True

    def _with_vector(  # a region by its node, parameter, input and function
        self, node: Node, name: str, rows: RowMap, x: Value, region: Region
    ) -> bool:
        """Lowers a sum or product of rows and a parameter of one element or one per column or
        head.
        """
        shape = self._state.captured.shapes[name] or (1,)
        if len(shape) != 1 or x.width % shape[0]:
            return False
        values, parameters = (
            draw((self._state.num_tokens, x.width), 11),
            draw_parameters({name: shape}),
        )
        vector = parameters[name].repeat_interleave(x.width // shape[0])
        result = region(values, parameters)
        kind = next(
            (
                kind
                for kind, expected in ((Add, values + vector), (Mul, values * vector))
                if are_equal(result, expected)
            ),
            None,
        )
        if kind is None:
            return False
        stored = self._state.weights.whole(name)
        row = self._emitter.value(stored.name, "tokens", shape[0])
        table = Weight(stored.name, (1, *shape), (stored.name,))
        self._emitter.append(Embedding(row, table, by_position=True, others_first=True))
        if kind is Add and shape != (x.width,):  # Add does not broadcast
            row = self._emitter.mul(self._ones(x.width), row)
        self._emit(node, rows, kind(x, row, Value("out", "tokens", x.width)))
        return True

    def _ones(self, width: int) -> Value:
        ones = self._emitter.value("ones", "tokens", width)
        table = Weight("ones", (1, width), fill=1.0)
        self._emitter.append(Embedding(ones, table, by_position=True, others_first=True))
        return ones

    def _binary(self, node: Node, first: Node, second: Node) -> bool:
        a, b = self._state.rows[first], self._state.rows[second]
        sizes = a.columns.numel(), b.columns.numel()
        if sizes[0] < sizes[1] or (sizes[0] == sizes[1] and len(a.shape) < len(b.shape)):
            a, b, first, second = b, a, second, first
        x, y = self._emitter.value_of(a), self._emitter.value_of(b)
        if self._graph.shape(node) != a.shape or self._graph.cone(node, [first, second])[1]:
            return False
        missing = (1,) * (len(a.shape) - len(b.shape))
        by_rows = y.width == 1 or y.width * a.shape[-1] == x.width
        shape = (*missing, *b.shape)
        if shape != a.shape and not (by_rows and shape == (*a.shape[:-1], 1)):
            return False

        def region(one: Any, other: Any, *, is_far: bool = False) -> Any:
            given = {first: a.tensor(one), second: b.tensor(other)}
            return a.flat(self._graph.run(node, given, {}, is_far=is_far))

        num_tokens = self._state.num_tokens
        one, other = draw((num_tokens, x.width), 9), draw((num_tokens, y.width), 10)
        if not are_equal(region(one, other), region(one, other, is_far=True)):
            return False
        op = find_combination(
            region,
            x,
            y,
            Value("out", "tokens", x.width),
            num_tokens,
            [*literals(self._graph.cone(node, [first, second])[0])],
        )
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
        """Returns an op whose parameters are replaced by the checkpoint's tensors."""
        whole = self._state.weights.whole
        if isinstance(op, Xielu):
            return Xielu(op.x, op.out, *(whole(weight.name) for weight in op.weights))
        if not isinstance(op, RmsNorm | LayerNorm) or op.weight.fill is not None:
            return op
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


def _arranged_region(
    region: Region, width: int, order: Any, values: Any, parameters: Mapping[str, Any]
) -> Any:
    return _arrange(region(values, parameters), width, order)


def _arrange(rows: Any, width: int, order: Any) -> Any:
    """Returns rows `[T, W]` with the columns of each head in another order."""
    return rows.reshape(len(rows), -1, width)[..., order].reshape(len(rows), -1)
