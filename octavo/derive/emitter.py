"""The ops of a Program while it is derived, and the Values that tensors of the graph stand for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from octavo.api.errors import UnsupportedModel
from octavo.derive.capture import Captured, reject
from octavo.derive.graph import TracedGraph, name_of
from octavo.derive.rows import Columns, RowMap
from octavo.derive.weights import Matrix, Weights
from octavo.program.ops import GatherRows, KvWrite, Linear
from octavo.program.program import Axis, Op, Value


@dataclass(frozen=True)
class GraphMatmul:
    """A matmul of the graph."""

    x: Value
    matrix: Matrix
    bias: str | None


class Emitter:
    """Appends ops and names their Values."""

    def __init__(self, model_type: str, weights: Weights, num_tokens: int) -> None:
        self.ops: list[Op] = []
        self.makers: dict[Value, Op] = {}
        self._model_type = model_type
        self._weights = weights
        self._num_tokens = num_tokens
        self._columns = Columns()
        self._products: dict[Value, GraphMatmul] = {}
        self._slices: dict[tuple[int, ...], Value] = {}
        self._used: Counter[str] = Counter()

    def append(self, op: Op) -> None:
        self.ops.append(op)
        for out in op.outputs:
            self.makers[out] = op

    def rows(self, value: Value, shape: tuple[int, ...], axis: int) -> RowMap:
        """Returns the map of a tensor whose elements are a Value's columns in order."""
        return self._columns.rows(value, shape, axis, self._num_tokens)

    def product(self, product: GraphMatmul) -> Value:
        """Appends a matmul, some columns of which may be read on their own."""
        out = self._part(product, range(product.matrix.outputs))
        self._products[out] = product
        return out

    def _part(self, product: GraphMatmul, rows: Sequence[int]) -> Value:
        """Appends a matmul with some rows of a matrix."""
        out = self.value(product.matrix.name.removesuffix(".weight"), len(rows))
        weights = self._weights.rows_of(product.matrix, rows)
        biases = self._weights.biases(product.bias, rows, weights) if product.bias else ()
        self.append(Linear(product.x, (out,), weights, biases))
        return out

    def value_of(self, rows: RowMap) -> Value:
        """Returns the Value whose columns are a tensor's elements in order."""
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

    def can_read(self, rows: Any) -> bool:
        if not isinstance(rows, RowMap) or not rows.columns.numel():
            return False
        try:
            self.value_of(rows)
        except UnsupportedModel:
            return False
        return True

    def value(self, name: str, width: int, axis: Axis = "tokens") -> Value:
        return Value(self.fresh(name), axis, width)

    def fresh(self, name: str) -> str:
        self._used[name] += 1
        return name if self._used[name] == 1 else f"{name}#{self._used[name]}"


def sample_rows(ops: list[Op], logits: Value) -> tuple[list[Op], Value]:
    """Gathers the sampled rows before the last matmul, whose logits only they need."""
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


@dataclass(frozen=True)
class LoweringState:
    """What the parts of a lowering share."""

    captured: Captured
    graph: TracedGraph
    weights: Weights
    emitter: Emitter
    config: Mapping[str, Any]
    num_tokens: int
    rows: dict[Node, Any] = field(default_factory=dict)
    """Row maps of the lowered nodes; a list of them for an operation with several results."""
    anchors: set[Node] = field(default_factory=set)
    """Nodes at which regions end: matmuls, embeddings, attention and experts."""
    dead: set[Node] = field(default_factory=set)
    """Nodes that no region with an op contains: they mix tokens, are matmuls of something that was
    not lowered, or depend on such a node.
    """

    def set_result(self, node: Node, value: Value, axis: int) -> None:
        """Makes a Value the result of a node."""
        self.rows[node] = self.emitter.rows(value, self.graph.shape(node), axis)

    def anchor(self, node: Node, value: Value) -> None:
        """Makes a Value the result of a node at which regions end."""
        shape = self.graph.shape(node)
        self.set_result(node, value, shape.index(self.num_tokens, min(1, len(shape) - 2)))
        self.anchors.add(node)

    def inputs(self, node: Node) -> set[Node]:
        """Returns the inputs of a node that depend on the tokens."""
        return {each for each in node.all_input_nodes if each in self.graph.dynamic}

    def latest(self, nodes: set[Node]) -> Node | None:
        """Returns the last of some nodes at which no region ends."""
        inner = nodes - self.anchors
        return max(inner, key=self.graph.order.__getitem__, default=None)

    def rejected(self, node: Any, what: str = "") -> UnsupportedModel:
        """Returns the error of a node, which names the first operation that was not lowered."""
        stack, missing = [node], [node]
        seen: set[Node] = set()
        while stack:
            each = stack.pop()
            if each in seen or each in self.rows or each not in self.graph.dynamic:
                continue
            seen.add(each)
            missing.append(each)
            stack += each.all_input_nodes
        first = min(missing, key=self.graph.order.__getitem__)
        shape = "x".join(map(str, self.graph.shape(first)))
        what = what or f"{name_of(first)} of {shape} ({first.name})"
        return reject(str(self.config["model_type"]), what)
