"""The captured graph, with three kinds of nodes, and its evaluation in float64.

A node is dynamic if it depends on the token ids, `static` if it depends on positions and constants
only, else a function of parameters.
"""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from octavo.derive.capture import Captured

MOVES = frozenset(
    f"aten.{name}"
    for name in (
        *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "slice", "select"),
        *("squeeze", "unsqueeze", "expand", "contiguous", "cat", "split", "chunk"),
        *("split_with_sizes", "flatten", "unflatten", "repeat", "repeat_interleave", "movedim"),
        *("narrow", "unbind", "stack", "swapaxes", "slice_scatter", "select_scatter"),
    )
) | {"getitem"}
"""Operations that move elements."""

SAME = frozenset(
    f"aten.{name}"
    for name in ("to", "_to_copy", "alias", "detach", "lift_fresh", "type_as", "dropout", "clone")
)
"""Operations that return their first argument in another precision or on another device."""

FAR_POSITION = 200_000
"""A position beyond any length at which a model changes its behaviour."""

SMALL_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class TracedGraph:
    """The nodes of a captured forward pass in order, with their dependencies."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.nodes: list[Node] = [
            node for node in captured.graph.graph.nodes if node.op == "call_function"
        ]
        self.order = {node: index for index, node in enumerate(captured.graph.graph.nodes)}
        self.output: Node = next(
            node.args[0] for node in captured.graph.graph.nodes if node.op == "output"
        )
        if isinstance(self.output, list | tuple):
            self.output = self.output[0]
        self.dynamic: set[Node] = set()
        self.values: dict[Node, Any] = {}
        """Values of static nodes for positions from 0."""
        self.ids: Node | None = None
        self._fold()
        self.far_position, self.far_values = self._find_far_values()
        """A position far behind the first, and the static nodes' values for positions from it."""

    def parameter(self, node: Node) -> str | None:
        """Returns the parameter of a placeholder; None for other nodes."""
        name = self.captured.placeholders.get(node.name) if node.op == "placeholder" else None
        return name if name in self.captured.shapes else None

    def shape(self, node: Node) -> tuple[int, ...]:
        value = node.meta["val"]
        return tuple(value.shape) if isinstance(value, torch.Tensor) else ()

    def _fold(self) -> None:
        """Marks the dynamic nodes and evaluates the static ones."""
        for node in self.captured.graph.graph.nodes:
            if node.op == "placeholder":
                name = self.captured.placeholders.get(node.name)
                if name is None:
                    self.ids = node
                    self.dynamic.add(node)
                elif name in self.captured.buffers:
                    self.values[node] = _widen(self.captured.buffers[name])
            elif node.op == "get_attr":
                self.values[node] = _widen(getattr(self.captured.graph, str(node.target)))
            elif node.op == "call_function":
                inputs = node.all_input_nodes
                if (
                    any(each in self.dynamic for each in inputs)
                    or name_of(node) == "aten.embedding"
                ):
                    self.dynamic.add(node)
                elif all(each in self.values for each in inputs):
                    self.values[node] = call(node, self.values)

    @property
    def _num_tokens(self) -> int:
        assert self.ids is not None
        return self.shape(self.ids)[1]

    def _find_far_values(self) -> tuple[int, dict[Node, Any]]:
        """Evaluates the static nodes beyond the text, or at the end of tables of positions."""
        try:
            return FAR_POSITION, self._values_from(FAR_POSITION)
        except (IndexError, RuntimeError):
            assert self.ids is not None
            position = max(self.captured.max_positions - self._num_tokens - 8, 0)
            return position, self._values_from(position)

    def _values_from(self, position: int) -> dict[Node, Any]:
        values: dict[Node, Any] = {}
        for node, value in self.values.items():
            if node.op != "call_function":
                values[node] = value
            elif name_of(node) == "aten.arange" and len(value) == self._num_tokens:
                values[node] = value + position
            else:
                values[node] = call(node, values)
        return values

    def run(
        self,
        node: Node,
        inputs: Mapping[Node, Any],
        parameters: Mapping[str, Any],
        *,
        is_far: bool = False,
    ) -> Any:
        """Evaluates a node in float64, given values of earlier nodes (`inputs`) and parameters, at
        the first positions or, with `is_far`, at those from `far_position` on.
        """
        values: dict[Node, Any] = dict(inputs)
        static = self.far_values if is_far else self.values

        def value(wanted: Node) -> Any:
            stack = [wanted]
            while stack:
                each = stack[-1]
                if each in values or each in static:
                    stack.pop()
                    continue
                if each.op == "placeholder":
                    values[each] = parameters[self.captured.placeholders[each.name]]
                    continue
                missing = [i for i in each.all_input_nodes if i not in values and i not in static]
                if missing:
                    stack += missing
                else:
                    values[each] = call(each, ChainMap(values, static))
            return values[wanted] if wanted in values else static[wanted]

        return value(node)

    def cone(self, node: Node, frontier: Iterable[Node]) -> tuple[list[Node], list[str]]:
        """Returns the nodes between the frontier and a node (including the node), and the
        parameters that they read.
        """
        seen: set[Node] = set(frontier)
        nodes: list[Node] = []
        parameters: list[str] = []
        stack = [node]
        while stack:
            each = stack.pop()
            if each in seen or each in self.values:
                continue
            seen.add(each)
            name = self.parameter(each)
            if name is not None:
                parameters.append(name)
            else:
                nodes.append(each)
                stack += each.all_input_nodes
        return nodes, sorted(set(parameters))


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in SMALL_FLOATS:
        return value.double()
    return value


def call(node: Node, values: Mapping[Node, Any]) -> Any:
    """Evaluates one node with every float as float64."""

    def argument(item: Any) -> Any:
        if isinstance(item, Node):
            return values[item]
        if isinstance(item, torch.dtype) and item in SMALL_FLOATS:
            return torch.float64
        if item is torch.complex64:
            return torch.complex128
        if isinstance(item, torch.device):
            return torch.device("cpu")
        return item

    args = torch.fx.node.map_aggregate(node.args, argument)
    kwargs = torch.fx.node.map_aggregate(node.kwargs, argument)
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    return _map_result(target(*args, **kwargs))


def _map_result(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(map(_widen, result))
    return _widen(result)


def name_of(node: Node) -> str:
    """Returns the operation's name, e.g. "aten.add"."""
    target = node.target
    if target is operator.getitem:
        return "getitem"
    packet = getattr(target, "overloadpacket", target)
    return str(packet)


def literals(nodes: Iterable[Node]) -> Iterator[float]:
    """Yields the float arguments of nodes, including default values."""
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        defaults = [each.default_value for each in schema.arguments] if schema else []
        for item in (*node.args, *node.kwargs.values(), *defaults):
            if isinstance(item, float):
                yield item
