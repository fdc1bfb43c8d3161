"""The ops of a Program while it is derived, and the Values that correspond to tensors of the
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.api.errors import UnsupportedModel
from octavo.derive.capture import reject
from octavo.derive.rows import Columns, RowMap
from octavo.derive.weights import Matrix, Weights
from octavo.program.builder import Builder
from octavo.program.ops import GatherRows, KvWrite, Linear
from octavo.program.program import Op, Value


@dataclass(frozen=True)
class GraphMatmul:
    """A matmul of the graph."""

    x: Value
    matrix: Matrix
    bias: str | None


class Emitter(Builder):
    """Builds the ops, and records which op produced which Value."""

    def __init__(self, model_type: str, weights: Weights, num_tokens: int) -> None:
        super().__init__("decoder")
        self.ops: list[Op] = []
        self.makers: dict[Value, Op] = {}
        self._model_type = model_type
        self._weights = weights
        self._num_tokens = num_tokens
        self._columns = Columns()
        self._products: dict[Value, GraphMatmul] = {}
        self._slices: dict[tuple[int, ...], Value] = {}

    def append(self, op: Op) -> None:
        self.ops.append(op)
        for out in op.outputs:
            self.makers[out] = op

    def rows(self, value: Value, shape: tuple[int, ...], axis: int) -> RowMap:
        """Returns the map of a tensor whose elements are a Value's columns in order."""
        return self._columns.rows(value, shape, axis, self._num_tokens)

    def product(self, product: GraphMatmul) -> Value:
        """Appends a matmul. Parts of its columns may be read separately."""
        out = self._part(product, range(product.matrix.outputs))
        self._products[out] = product
        return out

    def _part(self, product: GraphMatmul, rows: Sequence[int]) -> Value:
        """Appends a matmul with some rows of a matrix."""
        out = self.value(product.matrix.name.removesuffix(".weight"), "tokens", len(rows))
        weights = self._weights.rows_of(product.matrix, rows)
        biases = self._weights.biases(product.bias, rows, weights) if product.bias else ()
        self.append(Linear(product.x, (out,), weights, biases))
        return out

    def value_of(self, rows: RowMap) -> Value:
        """Returns the Value whose columns equal a tensor's elements in order."""
        key = tuple(rows.columns.reshape(-1).tolist())
        if key in self._slices:
            return self._slices[key]
        sources = self._columns.sources(rows)
        value, columns = sources[0]
        if len(sources) > 1:
            names = ", ".join(dict.fromkeys(each.name for each, _ in sources))
            raise reject(self._model_type, f"the columns of {names} are put together")
        if columns != [*range(value.width)]:
            product = self._products.get(value)
            if product is None:
                raise reject(self._model_type, f"some columns of {value.name} are read")
            value = self._part(product, columns)
        self._slices[key] = value
        return value

    def whole_values(self, rows: RowMap) -> list[Value]:
        """Returns the Values that a tensor is put together from, if all are whole."""
        sources = self._columns.sources(rows)
        if any(columns != [*range(value.width)] for value, columns in sources):
            return []
        return [value for value, _ in sources]

    def product_of_parts(self, parts: Sequence[Value], matrix: Matrix, bias: str | None) -> Value:
        """Appends a matmul of Values side by side: a sum of matmuls with columns of the matrix."""
        weights = self._weights.rows_of(matrix, range(matrix.outputs))
        if len(weights) > 1 or sum(part.width for part in parts) != matrix.inputs:
            raise reject(self._model_type, f"{matrix.name} reads several tensors side by side")
        biases = self._weights.biases(bias, range(matrix.outputs), weights) if bias else ()
        total, first = None, 0
        for part in parts:
            out = self.value(matrix.name.removesuffix(".weight"), "tokens", matrix.outputs)
            columns = weights[0].part(inputs=(first, first + part.width))
            self.append(Linear(part, (out,), (columns,), biases if total is None else ()))
            total = out if total is None else self.add(total, out)
            first += part.width
        assert total is not None
        return total

    def owner(self, columns: Any) -> tuple[Value, Any] | None:
        """Returns the Value of some columns, and its columns; None if they are of several."""
        sources = self._columns.sources(RowMap(columns, 0, self._num_tokens))
        return (sources[0][0], torch.tensor(sources[0][1])) if len(sources) == 1 else None

    def product_of(self, columns: Any) -> GraphMatmul | None:
        """Returns the matmul whose columns these are, all of them in order."""
        found = self.owner(columns)
        if found is None or found[1].tolist() != [*range(found[0].width)]:
            return None
        return self._products.get(found[0])

    def can_read(self, rows: Any) -> bool:
        if not isinstance(rows, RowMap) or not rows.columns.numel():
            return False
        try:
            self.value_of(rows)
        except UnsupportedModel:
            return False
        return True


def sample_rows(ops: list[Op], logits: Value) -> tuple[list[Op], Value]:
    """Gathers the sampled rows before the last matmul, so that only their logits are computed."""
    made = {out: op for op in ops for out in op.outputs}
    chain: list[Op] = []
    value = logits
    while not (chain and isinstance(chain[-1], Linear)):
        op = made[value]
        chain.append(op)
        value = op.inputs[0]
    new: dict[Value, Value] = {value: Value("sampled", "samples", value.width)}
    result = [op for op in ops if op not in chain]
    result.append(GatherRows(value, new[value]))
    for op in reversed(chain):
        for out in op.outputs:
            new[out] = Value(out.name, "samples", out.width)
        result.append(op.on(new))
    return result, new[logits]


def remove_unread(ops: list[Op], out: Value) -> list[Op]:
    """Returns the ops that contribute to the output."""
    needed = {out}
    kept = []
    for op in reversed(ops):
        if isinstance(op, KvWrite) or any(each in needed for each in op.outputs):
            kept.append(op)
            needed |= set(op.inputs)
    return kept[::-1]
