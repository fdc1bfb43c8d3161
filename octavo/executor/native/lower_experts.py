"""Lowering of a mixture of experts: its choice, its products, and the rows that ranks pass on."""

from __future__ import annotations

from typing import Any

from octavo.executor.native.parameters import gate_numbers, route_parameters
from octavo.executor.native.stage_emitter import WHOLE_ROWS, StageEmitter
from octavo.program import expert_ops, ops, rank_ops
from octavo.program.program import Value


class ExpertLowering:
    """Tells the executor's builder of experts; an op `X` is lowered by `lower_X`."""

    def __init__(self, emitter: StageEmitter) -> None:
        self._emitter = emitter
        self._weights, self._builder, self._span = emitter.weights, emitter.builder, emitter.span
        self._routes: dict[Value, tuple[int, expert_ops.Route]] = {}
        """The executor's choice of experts that makes a Value, and its op."""
        self._chosen_rows: set[Value] = set()
        """Rows of tokens, for the first product of the experts that they chose."""

    def lower_Route(self, op: expert_ops.Route) -> None:
        self._emitter.begin()
        index = self._builder.route(
            self._span(op.logits),
            self._span(op.outs[2]),
            **route_parameters(op, self._weights.floats),
        )
        self._routes |= dict.fromkeys(op.outs, (index, op))
        self._chosen_rows.add(op.outs[0])

    def lower_GroupedLinear(self, op: expert_ops.GroupedLinear) -> None:
        route, _ = self._routes[op.ids]
        if op.up is None:
            tiles, ups = self._weights.experts(op.weight), list[Any]()
        else:
            tiles, ups = self._weights.experts_gate_and_up(op.weight, op.up)
        rows = self._expert_rows(op, tiles[0])
        self._emitter.await_weights(op)
        gate = op.gate or (ops.Gate(op.activation) if op.activation else None)
        self._builder.experts(
            route,
            rows,
            [each.handle for each in tiles],
            [each.handle for each in ups],
            self._span(op.out),
            bias=self._emitter.optional(op.bias),
            up_bias=self._emitter.optional(op.up_bias),
            gate=gate_numbers(gate),
        )

    def _expert_rows(self, op: expert_ops.GroupedLinear, tiles: Any) -> int:
        """Returns the rows that a product of experts reads, converted by the choice of experts, the
        product before it, or a stage of their own; opens the product's stage.
        """
        route, chosen = self._routes[op.ids]
        if op.x in self._chosen_rows and chosen.scales_rows:
            self._emitter.begin()
            rows = self._builder.expert_conversion(
                self._span(chosen.x), route, tiles.handle, by=self._span(chosen.outs[2])
            )
        elif op.x in self._chosen_rows:
            rows = self._builder.convert_in_route(self._span(chosen.x), tiles.handle)
            self._emitter.begin()
        elif (
            isinstance(self._emitter.before, expert_ops.GroupedLinear)
            and self._emitter.before.out == op.x
            and self._emitter.num_readers[op.x] == 1
            and tiles.row_type not in WHOLE_ROWS
            and not chosen.scales_rows  # its product reads the memory that these rows would have
        ):
            rows = self._builder.convert_in_last_stage(
                self._span(op.x), tiles.handle, keeps_out=False
            )
            self._emitter.begin()
        else:
            self._emitter.begin()
            rows = self._builder.expert_conversion(self._span(op.x), route, tiles.handle, by=None)
        return int(rows)

    def lower_Combine(self, op: expert_ops.Combine) -> None:
        route, _ = self._routes[op.weights_value]
        self._builder.combine(
            self._span(op.x), self._span(op.weights_value), self._span(op.out), route
        )

    def lower_Dispatch(self, op: rank_ops.Dispatch) -> None:
        """Tells the choice of experts whose rows are computed here: no stage of its own, unless
        other engines have tokens too.
        """
        index, route = self._routes[op.ids]
        self._builder.dispatch(index, op.first, op.last)
        self._routes[op.out] = (index, route)
        if op.num_engines > 1:
            self._emitter.begin()
            weights = self._span(route.outs[2])
            self._builder.dispatch_rows(self._span(route.x), weights, index)
            self._chosen_rows.update(op.outs)

    def lower_Collect(self, op: rank_ops.Collect) -> None:
        index, _ = self._routes[op.ids]
        self._emitter.begin()
        self._builder.collect(self._span(op.x), self._span(op.out), index, list(op.firsts))
