"""Lowers experts: first the router, whose rule is identified, then the matmuls of the chosen
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.fx import Node

from octavo.derive.capture import ExpertModule
from octavo.derive.probe import MAX_REGION
from octavo.derive.routers import find_route
from octavo.derive.rows import RowMap
from octavo.derive.state import LoweringState
from octavo.program.expert_ops import Route
from octavo.program.ops import ActMul
from octavo.program.program import Value


class ExpertDeriver:
    """Lowers the experts ops of one graph."""

    def __init__(self, state: LoweringState) -> None:
        self._state = state
        self._graph = state.graph
        self._emitter = state.emitter
        self._counts = [each for each in state.config.values() if type(each) is int]

    def lower(self, node: Node) -> None:
        x, ids, weights, index = cast(Any, node.args)
        experts = self._state.captured.experts[index]
        rows = self._state.rows.get(x)
        if not isinstance(rows, RowMap):
            raise self._state.rejected(x)
        if experts.gate is None:
            raise self._state.rejected(node, f"experts of {experts.module}")
        source, route = self._router(ids, weights)
        hidden = self._emitter.value_of(rows)
        logits = self._emitter.value_of(self._state.rows[source])
        outs = self._emitter.route(
            hidden,
            logits,
            route.top_k,
            score=route.score,
            bias=None if route.bias is None else self._state.weights.whole(route.bias.name),
            num_groups=route.num_groups,
            top_groups=route.top_groups,
            group_rank=route.group_rank,
            normalize=route.normalize,
            scale=route.scale,
        )
        out = self._emit_experts(experts, outs, logits.width)
        self._state.anchor(node, out)

    def _router(self, ids: Node, weights: Any) -> tuple[Node, Route]:
        """Returns the node of a router's logits, and the router's rule."""
        frontier = {ids, weights}
        for _ in range(MAX_REGION):
            if len(frontier) == 1:
                (source,) = frontier
                if (
                    self._emitter.can_read(self._state.rows.get(source))
                    and source in self._state.anchors
                ):
                    break
            latest = self._state.latest(frontier)
            if latest is None:
                raise self._state.rejected(ids, "a router of several inputs")
            frontier = frontier - {latest} | self._state.inputs(latest)
        names = {name for each in (ids, weights) for name in self._graph.cone(each, [source])[1]}
        if len(names) > 1:
            raise self._state.rejected(ids, f"a router with {', '.join(sorted(names))}")
        (bias,) = names or (None,)

        def router(logits: Any, values: Any) -> tuple[Any, Any]:
            given = {source: logits.reshape(self._graph.shape(source))}
            parameters = {bias: values} if bias else {}
            results = [self._graph.run(each, given, parameters) for each in (ids, weights)]
            first, second = (each.reshape(len(logits), -1) for each in results)
            return first, second

        num_experts = self._graph.shape(source)[-1]
        route = find_route(
            router, self._state.num_tokens, num_experts, bias=bias, counts=self._counts
        )
        if route is None:
            raise self._state.rejected(ids, "a router with another rule")
        return source, route

    def _emit_experts(self, experts: ExpertModule, routed: tuple[Value, ...], count: int) -> Value:
        rows, ids, weights = routed
        assert experts.gate is not None

        def product(x: Value, name: str, columns: Sequence[int]) -> Value:
            weight, bias = self._state.weights.expert_rows(experts, name, columns, x.width, count)
            return self._emitter.grouped_linear(x, ids, weight, bias)

        width = self._state.weights.expert_width(experts)
        if experts.has_gate:
            first, second = range(width), range(width, 2 * width)
            if not experts.is_concatenated:
                first, second = range(0, 2 * width, 2), range(1, 2 * width, 2)
            gate = product(rows, "gate_up_proj", first)
            up = product(rows, "gate_up_proj", second)
            found = cast(ActMul, experts.gate)
            hidden = self._emitter.act_mul(
                gate,
                up,
                found.activation,
                clamp=found.clamp,
                alpha=found.alpha,
                up_offset=found.up_offset,
            )
        else:
            up = product(rows, "up_proj", range(width))
            hidden = self._emitter.act(up, experts.gate.activation)
        return self._emitter.combine(product(hidden, "down_proj", range(rows.width)), weights)
