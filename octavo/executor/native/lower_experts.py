"""Lowering of mixture-of-experts ops: routing, expert matmuls, and row exchange between ranks."""

from __future__ import annotations

from typing import Any

from octavo.executor.native.lowering_context import WHOLE_ROWS, LoweringContext
from octavo.program import expert_ops, ops, rank_ops
from octavo.program.program import Value


class ExpertLowering:
    """Adds expert ops to the builder; `lower_X` lowers op `X`."""

    def __init__(self, context: LoweringContext) -> None:
        self._context, self._native = context, context.native
        self._weights, self._add, self._span = context.weights, context.builder.add, context.span
        self._routes: dict[Value, tuple[int, expert_ops.Route]] = {}
        """The builder's route and the op, by the Values that it and its matmuls produce."""
        self._chosen_rows: set[Value] = set()
        """Token rows that the first matmul of the chosen experts reads."""

    def get_route(self, rows: Value) -> int:
        """Returns the builder's route of expert rows; -1 for other rows."""
        return self._routes[rows][0] if rows.axis == "expert_rows" else -1

    def lower_Route(self, op: expert_ops.Route) -> None:
        route = self._add(
            self._native.RouteSpec(
                logits=self._span(op.logits),
                weights=self._span(op.outs[2]),
                top_k=op.top_k,
                score=op.score,
                bias=self._context.floats_or_none(op.bias),
                num_groups=op.num_groups,
                top_groups=op.top_groups,
                group_rank=op.group_rank,
                normalize=op.normalize,
                scales_rows=op.scales_rows,
                scale=op.scale,
                jitter=op.jitter,
                factors=self._context.floats_or_none(op.factors),
            )
        )
        self._routes |= dict.fromkeys(op.outs, (route, op))
        self._chosen_rows.add(op.outs[0])

    def lower_GroupedLinear(self, op: expert_ops.GroupedLinear) -> None:
        route, chosen = self._routes[op.out] = self._routes[op.ids]
        if op.up is None:
            tiles, ups = self._weights.experts(op.weight), list[Any]()
        else:
            tiles, ups = self._weights.experts_gate_and_up(op.weight, op.up)
        of_tokens = op.x in self._chosen_rows
        scales_rows = of_tokens and chosen.scales_rows
        self._add(
            self._native.ExpertsSpec(
                route=route,
                x=self._span(chosen.x if of_tokens else op.x),
                out=self._span(op.out),
                scaled_by=self._span(chosen.outs[2]) if scales_rows else None,
                fuses_input=not chosen.scales_rows
                and (of_tokens or self._may_convert(op, tiles[0].row_type)),
                weights=[expert.handle for expert in tiles],
                ups=[expert.handle for expert in ups],
                bias=self._context.floats_or_none(op.bias),
                up_bias=self._context.floats_or_none(op.up_bias),
                gate=self._context.gate_spec(
                    op.gate or (ops.Gate(op.activation) if op.activation else None)
                ),
                chunk=self._context.get_chunk(op),
            )
        )

    def _may_convert(self, op: expert_ops.GroupedLinear, row_type: str) -> bool:
        """Returns whether the previous matmul may write x in the form that this one reads.

        False if routing scales rows: the previous matmul then still reads the memory that these
        rows would overwrite.
        """
        before = self._context.before
        return (
            isinstance(before, expert_ops.GroupedLinear)
            and before.out == op.x
            and self._context.num_readers[op.x] == 1
            and row_type not in WHOLE_ROWS
        )

    def lower_Combine(self, op: expert_ops.Combine) -> None:
        route, _ = self._routes[op.weights_value]
        self._add(
            self._native.CombineSpec(
                x=self._span(op.x),
                weights=self._span(op.weights_value),
                out=self._span(op.out),
                route=route,
            )
        )

    def lower_Dispatch(self, op: rank_ops.Dispatch) -> None:
        """Restricts a route to the local experts; with several engines, also exchanges
        token rows.
        """
        route, chosen = self._routes[op.ids]
        self._routes[op.out] = (route, chosen)
        exchanges = op.num_engines > 1
        if exchanges:
            self._chosen_rows.update(op.outs)
        self._add(
            self._native.DispatchSpec(
                route=route,
                first=op.first,
                last=op.last,
                x=self._span(chosen.x) if exchanges else None,
                weights=self._span(chosen.outs[2]) if exchanges else None,
            )
        )

    def lower_Collect(self, op: rank_ops.Collect) -> None:
        route, _ = self._routes[op.ids]
        self._add(
            self._native.CollectSpec(
                x=self._span(op.x), out=self._span(op.out), route=route, firsts=list(op.firsts)
            )
        )
