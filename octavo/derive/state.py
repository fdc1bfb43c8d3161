"""State shared by the parts of a lowering: the nodes lowered so far, and the nodes at which regions
end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from octavo.api.errors import UnsupportedModel
from octavo.derive.capture import Captured, reject
from octavo.derive.emitter import Emitter
from octavo.derive.graph import SAME, TracedGraph, name_of
from octavo.derive.rows import RowMap
from octavo.derive.weights import Weights
from octavo.program.program import Value


@dataclass(frozen=True)
class LoweringState:
    """The state of one lowering."""

    captured: Captured
    graph: TracedGraph
    weights: Weights
    emitter: Emitter
    config: Mapping[str, Any]
    num_tokens: int
    rows: dict[Node, Any] = field(default_factory=dict)
    """Row maps of the lowered nodes; a list of them for an operation with several results."""
    moved: dict[Node, RowMap] = field(default_factory=dict)
    """Row maps, before they became an op's result, of tensors put together from several Values."""
    anchors: set[Node] = field(default_factory=set)
    """Nodes at which regions end: matmuls, embeddings, attention and experts."""
    dead: set[Node] = field(default_factory=set)
    """Nodes that cannot be part of a region: they mix tokens, are matmuls of inputs that were not
    lowered, or depend on such a node.
    """

    def set_result(self, node: Node, value: Value, axis: int) -> None:
        """Records a Value as the result of a node."""
        self.rows[node] = self.emitter.rows(value, self.graph.shape(node), axis)

    def anchor(self, node: Node, value: Value) -> None:
        """Records a Value as the result of a node at which regions end."""
        shape = self.graph.shape(node)
        self.set_result(node, value, shape.index(self.num_tokens, min(1, len(shape) - 2)))
        self.anchors.add(node)

    def inputs(self, node: Node) -> set[Node]:
        """Returns the inputs of a node that depend on the tokens."""
        if name_of(node) in SAME:
            return {node.args[0]} & self.graph.dynamic  # type: ignore[return-value]
        return {each for each in node.all_input_nodes if each in self.graph.dynamic}

    def latest(self, nodes: set[Node]) -> Node | None:
        """Returns the last of `nodes` at which no region ends; None if there is none."""
        inner = nodes - self.anchors
        return max(inner, key=self.graph.order.__getitem__, default=None)

    def rejected(self, node: Any, what: str = "") -> UnsupportedModel:
        """Returns the error for a node, naming the first operation that was not lowered."""
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
