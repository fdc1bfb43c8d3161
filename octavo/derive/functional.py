"""Rewrites a captured graph without operations that change tensors in place, or that read a tensor
only for its shape or type.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

ATEN = torch.ops.aten

LIKE = {
    **dict.fromkeys(("aten.new_empty", "aten.empty_like", "aten.zeros_like", "aten.new_zeros"), 0),
    **dict.fromkeys(("aten.ones_like", "aten.new_ones"), 1),
}
"""Operations that return a constant tensor in the shape of another, and the constant."""

SHAPED = {
    "aten.reshape_as": ATEN.reshape.default,
    "aten.view_as": ATEN.reshape.default,
    "aten.expand_as": ATEN.expand.default,
}
"""Operations that give a tensor the shape of another, and the same with an explicit shape."""


def functionalize(module: GraphModule) -> None:
    """Rewrites the graph of a module in place."""
    for node in [*module.graph.nodes]:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = str(node.target.overloadpacket)
        value = node.meta.get("val")
        if name in LIKE or name in ("aten.full_like", "aten.new_full"):
            number = LIKE[name] if name in LIKE else _fill_value(node, name)
            if not isinstance(number, Node):
                node.target = ATEN.full.default
                node.args = ([*value.shape], number)
                node.kwargs = {"dtype": value.dtype}
        elif name in SHAPED:
            node.target = SHAPED[name]
            node.args, node.kwargs = (node.args[0], [*value.shape]), {}
        elif name == "aten.type_as":
            node.target = ATEN.to.dtype
            node.args, node.kwargs = (node.args[0], value.dtype), {}
        elif name.endswith("_") and not name.endswith("__") and node.target._schema.is_mutable:
            _without_mutation(module.graph, node, name)


def _fill_value(node: Node, name: str) -> Any:
    index = 1 if name == "aten.full_like" else 2
    return node.args[index] if len(node.args) > index else node.kwargs["fill_value"]


def _without_mutation(graph: Graph, node: Node, name: str) -> None:
    """Replaces an in-place operation by the one that returns a new tensor. If the changed tensor is
    a slice, the new tensor is scattered into the tensor that it is a slice of.
    """
    if name == "aten.copy_":
        changed, source = node.args[:2]
        if isinstance(changed, Node) and isinstance(source, Node):
            node.args = (source, [*node.meta["val"].shape])
            node.target, node.kwargs = ATEN.expand.default, {}
            _scatter(graph, node, changed)
        return
    packet = getattr(ATEN, name.removeprefix("aten.")[:-1], None)
    overload = node.target._overloadname  # type: ignore[union-attr]
    if packet is None or overload not in packet.overloads():
        return
    changed = node.args[0]
    node.target = getattr(packet, overload)
    if isinstance(changed, Node):
        _scatter(graph, node, changed)


def _scatter(graph: Graph, node: Node, changed: Node) -> None:
    """Makes later readers of `changed`, and of the tensors it is a slice of, read `node`."""
    new, old = node, changed
    while old.op == "call_function" and old.target in (ATEN.slice.Tensor, ATEN.select.int):
        base = cast(Node, old.args[0])
        scatter = ATEN.slice_scatter if old.target is ATEN.slice.Tensor else ATEN.select_scatter
        with graph.inserting_after(new):
            result = graph.call_function(scatter.default, (base, new, *old.args[1:]))
        result.meta = dict(base.meta)
        _replace_later(graph, base, result)
        new, old = result, base
    if old is changed:
        _replace_later(graph, old, node)


def _replace_later(graph: Graph, old: Node, new: Node) -> None:
    order = {each: index for index, each in enumerate(graph.nodes)}
    for user in [*old.users]:
        if order[user] > order[new]:
            user.replace_input_with(old, new)
