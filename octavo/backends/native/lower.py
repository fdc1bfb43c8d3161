"""Lowering: a fused Program becomes calls on the native executor's builder, one for each op.

Decides which op converts a product's rows and which weights stand in one product; the stages are
those of stages.py. Knows nothing of kernels; what these cannot do check.py has refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import ObservedInputs
from octavo.backends.native.check import MAX_LANES
from octavo.backends.native.hidden import HiddenIn, HiddenOut
from octavo.backends.native.neurons import Neurons, OpenedNeurons
from octavo.backends.native.parameters import (
    angles_parameters,
    convolution_parameters,
    distances_of,
    gate_numbers,
    rope_parameters,
    route_parameters,
    scan_parameters,
    slopes_of,
)
from octavo.backends.native.stages import Stage, body_first, plan_arena, stages_of
from octavo.program import ops
from octavo.program.low_rank import Site
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.passes.plan import Plan
from octavo.program.place_tables import place_buckets
from octavo.program.program import Op, Program, Value, Weight

GROUP = 32
"""Inputs that share an activation scale (csrc/kernels/table.h)."""

WHOLE_ROWS = ("whole", "outliers")
"""Types of rows with one scale, which cannot be converted before all of a row is there."""

Span = tuple[str, int, int]
"""(axis, offset, width): a Place as the bindings take it."""

HEAD = "samples"
"""The executor's axis of the rows that its head is over: sampled rows, or requests where these are
pooled.
"""

LinearPart = tuple[Any, Span, NDArray[np.float32] | None, Span | None, int]
"""(tiles, columns of the out, bias, columns of the residual, site or -1) of one weight of a Linear.
"""


class Weights(Protocol):
    """The source of an op's weights, as tiles (NativeTiles) or as floats."""

    def tiles(self, weight: Weight) -> Any: ...
    def table(self, weight: Weight) -> Any: ...
    def gate_and_up(self, gate: Weight, up: Weight) -> list[Any]: ...
    def experts(self, weight: Weight) -> list[Any]: ...
    def heads(self, op: ops.HeadLinear) -> list[Any]: ...
    def place_table(self, op: ops.PlaceScores) -> list[Any]: ...
    def experts_gate_and_up(self, gate: Weight, up: Weight) -> tuple[list[Any], list[Any]]: ...
    def floats(self, weight: Weight) -> NDArray[np.float32]: ...


class Lowering:
    """Walks a Program once, opens its stages on the builder and tells it of each op."""

    def __init__(
        self,
        program: Program,
        builder: Any,
        weights: Weights,
        chunk_of: Callable[[Op], int | None] = lambda op: None,
        observed: ObservedInputs | None = None,
        *,
        neurons: OpenedNeurons | None = None,
    ) -> None:
        """`chunk_of` names the streamed chunk of weights that a product waits for; `observed` gets
        the arrays that inputs of products are copied to; `neurons` are the records of layers that
        are read neuron by neuron.
        """
        self._neurons = neurons
        self._chunk_of = chunk_of
        self._observed = observed
        self._program = program = body_first(program)
        self._builder = builder
        self._weights = weights
        self._floats = weights.floats
        self._stages = stages_of(program)
        self._plan: Plan = plan_arena(program, self._stages)
        self._stage = self._stages[0]
        """The stage whose ops are lowered."""
        self._open_rows: Stage | None = None
        """The stage that takes row ops on the builder; None: the last one opened takes none."""
        self._angles: dict[ops.RopeTable, int] = {}
        self._num_readers = Counter(value for op in program.ops for value in op.inputs)
        self._num_readers.update(program.outputs.values())
        self._converted: set[Value] = set()
        """Values that the op which makes them writes as their one reader's product reads them."""
        self._routes: dict[Value, tuple[int, ops.Route]] = {}
        """The executor's choice of experts that makes a Value, and its op."""
        self._before: Op | None = None
        """The op before the one that is lowered."""
        self.sites: list[Site] = []
        """The Program's sites, in the executor's order."""

    def run(self) -> None:
        for stage in self._stages:
            self._stage = stage
            if stage.is_row_local:
                self._begin_rows()
            for op in stage.ops:
                getattr(self, f"_lower_{op.kind}")(op)
                self._before = op
        self._begin()
        ((name, out),) = self._program.outputs.items()
        if name == "hidden":
            pass  # its op has handed it over
        elif name == "logits":
            self._builder.sampling(self._span(out))
        else:
            self._builder.output(self._span(out))
        floats = self._plan.row_floats
        self._builder.finish(
            token_floats=floats.get("tokens", 0),
            block_floats=floats.get("block", 0),
            sample_floats=0 if name == "hidden" else floats.get(out.axis, 0),
            expert_floats=floats.get("expert_rows", 0),
        )

    def _begin(self) -> None:
        """Opens a stage for an op that is not row-local."""
        self._builder.begin_stage(_executor_axis(self._stage.axis), self._stage.range)
        self._open_rows = None

    def _await(self, op: Op) -> None:
        """Lets the next product wait for its weights where they are streamed."""
        chunk = self._chunk_of(op)
        if chunk is not None:
            self._builder.await_chunk(chunk)

    def _begin_rows(self) -> None:
        """Opens a stage of row ops."""
        self._begin()
        self._open_rows = self._stage

    def _span(self, value: Value) -> Span:
        place = self._plan.places[value.name]
        return (_executor_axis(place.axis), place.offset, place.width)

    # -- rows --------------------------------------------------------------------------------------

    def _lower_Embedding(self, op: ops.Embedding) -> None:
        self._builder.embedding(
            self._weights.table(op.table).handle,
            self._span(op.out),
            scale=op.scale,
            by_position=op.by_position,
            offset=op.offset,
            axis=op.axis,
            first_row=-1 if op.first_row is None else op.first_row,
            site=self._table_site(op),
        )

    def _table_site(self, op: ops.Embedding) -> int:
        if not op.site:
            return -1
        self.sites.append((op.site, op.table))
        return int(self._builder.table_site())

    def _lower_RmsNorm(self, op: ops.RmsNorm) -> None:
        norm = (self._floats(op.weight), None, op.eps, op.weight_offset, False)
        each_group = op.weight.shape[0] > (op.group_width or op.x.width)
        self._builder.norm(
            self._span(op.x), self._span(op.out), norm, op.group_width, each_group=each_group
        )

    def _lower_LayerNorm(self, op: ops.LayerNorm) -> None:
        bias = self._optional(op.bias)
        norm = (self._floats(op.weight), bias, op.eps, op.weight_offset, True)
        each_group = op.weight.shape[0] > (op.group_width or op.x.width)
        self._builder.norm(
            self._span(op.x), self._span(op.out), norm, op.group_width, each_group=each_group
        )

    def _lower_Rope(self, op: ops.Rope) -> None:
        if op.table not in self._angles:
            self._angles[op.table] = self._builder.angles(**angles_parameters(op.table))
        self._builder.rope(
            self._span(op.x),
            self._span(op.out),
            **rope_parameters(op),
            angles=self._angles[op.table],
            axes=list(op.table.axes),
        )

    def _lower_KvWrite(self, op: ops.KvWrite) -> None:
        group = self._program.group(op.group)
        v = op.k_parts[0] if group.kind == "conv" else op.v  # its rows lie where values do
        parts, values = [self._span(part) for part in op.k_parts], v and self._span(v)
        self._builder.kv_write(parts, values, self._program.group_index(op.group), op.layer)

    def _lower_Add(self, op: ops.Add) -> None:
        self._elementwise("add", op.a, op.b, op.out)

    def _lower_Mul(self, op: ops.Mul) -> None:
        self._elementwise("mul", op.a, op.b, op.out)

    def _lower_Scale(self, op: ops.Scale) -> None:
        self._elementwise("scale", op.x, op.x, op.out, factor=op.factor)

    def _lower_SoftCap(self, op: ops.SoftCap) -> None:
        self._elementwise("softcap", op.x, op.x, op.out, factor=op.cap)

    def _lower_Clip(self, op: ops.Clip) -> None:
        self._elementwise("clip", op.x, op.x, op.out, factor=op.limit)

    def _lower_MatchMagnitude(self, op: ops.MatchMagnitude) -> None:
        self._elementwise("match", op.x, op.like, op.out, factor=op.least)

    def _lower_KeepLargest(self, op: ops.KeepLargest) -> None:
        self._elementwise("largest", op.x, op.x, op.out, factor=op.deviations)

    def _lower_Mix(self, op: ops.Mix) -> None:
        xs, bases, outs = (
            [self._span(value) for value in each] for each in (op.xs, op.bases, op.outs)
        )
        self._builder.mix(xs, bases, self._span(op.coefs), outs, op.offset)

    def _lower_Act(self, op: ops.Act) -> None:
        self._elementwise("activate", op.x, op.x, op.out, gate=ops.Gate(op.activation))

    def _lower_ActMul(self, op: ops.ActMul) -> None:
        self._elementwise(
            "gate",
            op.gate,
            op.up,
            op.out,
            gate=ops.Gate(op.activation, op.clamp, op.alpha, op.up_offset, op.threshold),
        )

    def _elementwise(
        self,
        kind: str,
        a: Value,
        b: Value,
        out: Value,
        *,
        factor: float = 1.0,
        gate: ops.Gate | None = None,
    ) -> None:
        self._builder.elementwise(
            kind,
            self._span(a),
            self._span(b),
            self._span(out),
            factor=factor,
            gate=gate_numbers(gate),
        )

    def _lower_GatherRows(self, op: ops.GatherRows) -> None:
        self._builder.gather(self._span(op.x), self._span(op.out))

    def _lower_ScatterRows(self, op: ops.ScatterRows) -> None:
        base = None if op.base is None else self._span(op.base)
        self._builder.given(base, self._span(op.out))

    def _lower_PoolRows(self, op: ops.PoolRows) -> None:
        self._builder.pool(self._span(op.x), self._span(op.out), op.mode)

    # -- products and attention --------------------------------------------------------------------

    def _lower_Linear(self, op: ops.Linear) -> None:
        gate = op.gate or (ops.Gate(op.activation) if op.activation else None)
        tiles = self._product_tiles(op)
        converted = len({each.row_type for each in tiles}) == 1 and self._comes_converted(op)
        rows = -1
        if converted:
            first, keeps_out = tiles[0].handle, bool(op.sites)
            rows = self._builder.convert_in_last_stage(self._span(op.x), first, keeps_out=keeps_out)
        for parts, permutation in self._parts_by_rows(op, self._shrink(op)):
            if not converted:
                rows = self._convert(op, parts[0][0], permutation)
            self._begin()
            self._await(op)
            self._builder.linear(
                rows,
                parts,
                gated=op.gate is not None,
                gate=gate_numbers(gate),
                skips_zeros=op.skips_zeros,
            )

    def _shrink(self, op: ops.Linear) -> list[int]:
        """Opens the stage that computes what adapters make of the product's rows; returns the site
        of each weight, -1 without sites.
        """
        if not op.sites:
            return [-1] * len(op.weights_)
        self._begin()
        self.sites += zip(op.sites, op.weights_, strict=True)
        return list(
            self._builder.shrink(self._span(op.x), self._norm_of(op), num_sites=len(op.sites))
        )

    def _lower_Neurons(self, op: Neurons) -> None:
        assert self._neurons is not None, "records are opened before"
        layer, scales = self._neurons.layers[id(op)]
        self._begin()
        self._builder.neurons(
            self._neurons.cache,
            layer,
            self._span(op.opened),
            threshold=op.threshold,
            out=None if op.out is None else self._span(op.out),
            x=self._span(op.opened if op.x is None else op.x),
            norm=self._norm_of(op),
            x_threshold=op.x_threshold,
            up_scales=scales,
            up_bias=self._optional(op.up_bias),
            up_offset=op.up_offset,
        )

    def _norm_of(
        self, op: ops.Linear | Neurons, permutation: NDArray[np.int32] | None = None
    ) -> tuple[Any, ...] | None:
        """Returns the norm of a product's rows, its numbers in the order of a permutation."""
        if op.norm is None:
            return None
        norm = op.norm
        weight, bias = self._floats(norm.weight), self._optional(norm.bias)
        if permutation is not None:
            weight, bias = weight[permutation], None if bias is None else bias[permutation]
        return (weight, bias, norm.eps, norm.weight_offset, norm.centered)

    def _convert(self, op: ops.Linear, tiles: Any, permutation: NDArray[np.int32] | None) -> int:
        """Converts x in the row ops right before the product, or in a stage of its own."""
        if self._open_rows is None or self._open_rows.axis != self._stage.axis:
            self._begin_rows()
        order = [] if permutation is None else permutation.tolist()
        norm = self._norm_of(op, permutation)
        rows = int(
            self._builder.conversion(self._span(op.x), norm, tiles, order, threshold=op.threshold)
        )
        if self._observed is not None:
            copies = np.zeros((self._observed.num_rows, op.x.width), np.float32)
            self._builder.observe(rows, copies)
            self._observed.inputs.update(dict.fromkeys(op.weights_, copies))
        return rows

    def _comes_converted(self, op: ops.Linear) -> bool:
        """Returns whether the op before may write x as this product reads it.

        It may where no other op reads x, x is converted in groups of 32, and these are whole there.
        """
        before = self._before
        if (
            op.norm is not None
            or op.threshold
            or self._observed is not None
            or before is None
            or op.x not in before.outputs
            or self._num_readers[op.x] > 1
        ):
            return False
        tiles = self._product_tiles(op)
        if any(one.row_type in WHOLE_ROWS or one.permutation is not None for one in tiles):
            return False
        if isinstance(before, ops.Attention):
            group = self._program.group(before.group)
            fits = group.v_width % GROUP == 0 and not before.latent_width
        elif isinstance(before, ops.Linear):
            single = len(before.outputs) == 1 and (
                before.gate is not None or len(before.weights_) == 1
            )
            fits = single and before.x not in self._converted
        else:
            fits = False
        if fits:
            self._converted.add(op.x)
        return fits

    def _parts_by_rows(
        self, op: ops.Linear, sites: list[int]
    ) -> list[tuple[list[LinearPart], NDArray[np.int32] | None]]:
        """Returns the parts of each weight, with their sites; parts that read their rows in the
        same type and order are together, beside that order.
        """
        out, residual = (
            self._span(op.outs[0]),
            None if op.residual is None else self._span(op.residual),
        )
        biases = op.biases or (None,) * len(op.weights_)
        found: dict[tuple[str, bytes], tuple[list[LinearPart], NDArray[np.int32] | None]] = {}
        column = 0
        for weight, tiles, bias, site in zip(
            op.weights_, self._product_tiles(op), biases, sites, strict=True
        ):
            width = weight.shape[0]
            part = (
                tiles.handle,
                _cut(out, column, width),
                self._optional(bias),
                residual and _cut(residual, column, width),
                site,
            )
            order = b"" if tiles.permutation is None else tiles.permutation.tobytes()
            found.setdefault((tiles.row_type, order), ([], tiles.permutation))[0].append(part)
            column += 0 if op.gate is not None else width
        assert op.gate is None or len(found) == 1, "check() refuses a gate and up of two row types"
        return list(found.values())

    def _product_tiles(self, op: ops.Linear) -> list[Any]:
        """Returns the tiles of each weight; gate and up read their rows in one type."""
        if op.gate is None:
            return [self._weights.tiles(weight) for weight in op.weights_]
        return self._weights.gate_and_up(*op.weights_)

    def _lower_Attention(self, op: ops.Attention) -> None:
        if op.latent_width:
            q, out = op.q.width // op.num_heads, op.out.width // op.num_heads
            for first in range(0, op.num_heads, MAX_LANES):
                heads = min(MAX_LANES, op.num_heads - first)
                self._attention(
                    op,
                    heads,
                    _cut(self._span(op.q), first * q, heads * q),
                    _cut(self._span(op.out), first * out, heads * out),
                )
        else:
            self._attention(op, op.num_heads, self._span(op.q), self._span(op.out))

    def _attention(self, op: ops.Attention, num_heads: int, q: Span, out: Span) -> None:
        window = {"causal": 0, "full": -1}.get(op.mask, op.window or 0)
        distances = distances_of(op.bias, self._floats, num_heads)
        self._begin()
        self._builder.attention(
            q,
            out,
            group=self._program.group_index(op.group),
            layer=op.layer,
            num_heads=num_heads,
            window=window,
            scale=op.scale,
            softcap=op.softcap or 0.0,
            sinks=self._optional(op.sinks),
            slopes=slopes_of(op.bias),
            distances=distances,
            reach=0 if distances is None else distances.shape[1] // 2,
            latent_width=op.latent_width,
            by_places=self._by_places(op),
        )

    def _by_places(self, op: ops.Attention) -> tuple[Span, Span, list[int]] | None:
        """Returns the products of queries and of keys with tables of places, and the bucket by the
        query's place less the key's; None for another bias.
        """
        if not isinstance(op.bias, ops.PlaceBuckets):
            return None
        assert op.of_queries is not None and op.of_keys is not None
        reach = op.bias.max_places - 1
        buckets = place_buckets(np.arange(-reach, reach + 1), op.bias)
        return (self._span(op.of_queries), self._span(op.of_keys), buckets.tolist())

    def _lower_PlaceScores(self, op: ops.PlaceScores) -> None:
        self._begin()
        tiles = [each.handle for each in self._weights.place_table(op)]
        self._builder.heads(self._span(op.x), self._span(op.out), None, tiles)

    def _lower_HeadLinear(self, op: ops.HeadLinear) -> None:
        self._begin()
        self._await(op)
        self._builder.heads(
            self._span(op.x),
            self._span(op.out),
            None if op.tail is None else self._span(op.tail),
            [tiles.handle for tiles in self._weights.heads(op)],
        )

    def _lower_HiddenIn(self, op: HiddenIn) -> None:
        self._builder.hidden_in(self._span(op.out))

    def _lower_HiddenOut(self, op: HiddenOut) -> None:
        self._builder.hidden_out(self._span(op.x))

    # -- ranks -------------------------------------------------------------------------------------

    def _lower_AllReduce(self, op: ops.AllReduce) -> None:
        self._begin()
        self._builder.all_reduce(self._span(op.x), self._span(op.out))

    def _lower_AllGather(self, op: ops.AllGather) -> None:
        self._begin()
        self._builder.all_gather(self._span(op.x), self._span(op.out), list(op.widths))

    def _lower_Dispatch(self, op: ops.Dispatch) -> None:
        """Tells the choice of experts whose rows are computed here: no stage of its own."""
        index, route = self._routes[op.ids]
        self._builder.dispatch(index, op.first, op.last)
        self._routes[op.out] = (index, route)

    def _lower_Collect(self, op: ops.Collect) -> None:
        index, _ = self._routes[op.ids]
        self._begin()
        self._builder.collect(self._span(op.x), self._span(op.out), index, list(op.firsts))

    # -- convolutions and recurrences --------------------------------------------------------------

    def _lower_ShortConv(self, op: ShortConv) -> None:
        axis, offset, _ = self._span(op.outs[0])
        self._begin()
        self._builder.short_conv(
            self._span(op.x),
            (axis, offset, op.x.width),
            group=self._program.group_index(op.group),
            layer=op.layer,
            fills=self._fills(op),
            **convolution_parameters(op, self._floats),
        )

    def _fills(self, op: ShortConv) -> bool:
        """Returns whether the Program itself writes the rows that a convolution reads."""
        return any(
            isinstance(other, ops.KvWrite) and other.k_parts == (op.x,) and other.group == op.group
            for other in self._program.ops
        )

    def _lower_SelectiveScan(self, op: SelectiveScan) -> None:
        self._begin()
        self._builder.selective_scan(
            *map(self._span, (op.x, op.dt, op.b, op.c, op.out)),
            beta=None if op.beta is None else self._span(op.beta),
            group=self._program.group_index(op.group),
            layer=op.layer,
            **scan_parameters(op, self._program.group(op.group), self._floats),
        )

    # -- experts -----------------------------------------------------------------------------------

    def _lower_Route(self, op: ops.Route) -> None:
        self._begin()
        index = self._builder.route(
            self._span(op.logits),
            self._span(op.outs[2]),
            **route_parameters(op, self._floats),
        )
        self._routes |= dict.fromkeys(op.outs, (index, op))

    def _lower_GroupedLinear(self, op: ops.GroupedLinear) -> None:
        route, _ = self._routes[op.ids]
        if op.up is None:
            tiles, ups = self._weights.experts(op.weight), list[Any]()
        else:
            tiles, ups = self._weights.experts_gate_and_up(op.weight, op.up)
        rows = self._expert_rows(op, tiles[0])
        self._await(op)
        gate = op.gate or (ops.Gate(op.activation) if op.activation else None)
        self._builder.experts(
            route,
            rows,
            [each.handle for each in tiles],
            [each.handle for each in ups],
            self._span(op.out),
            bias=self._optional(op.bias),
            up_bias=self._optional(op.up_bias),
            gate=gate_numbers(gate),
        )

    def _expert_rows(self, op: ops.GroupedLinear, tiles: Any) -> int:
        """Returns the rows that a product of experts reads, converted by the choice of experts, the
        product before it, or a stage of their own; opens the product's stage.
        """
        route, chosen = self._routes[op.ids]
        if op.x == chosen.outs[0] and chosen.scales_rows:
            self._begin()
            rows = self._builder.expert_conversion(
                self._span(chosen.x), route, tiles.handle, by=self._span(chosen.outs[2])
            )
        elif op.x == chosen.outs[0]:
            rows = self._builder.convert_in_route(self._span(chosen.x), tiles.handle)
            self._begin()
        elif (
            isinstance(self._before, ops.GroupedLinear)
            and self._before.out == op.x
            and self._num_readers[op.x] == 1
            and tiles.row_type not in WHOLE_ROWS
            and not chosen.scales_rows  # its product reads the memory that these rows would have
        ):
            rows = self._builder.convert_in_last_stage(
                self._span(op.x), tiles.handle, keeps_out=False
            )
            self._begin()
        else:
            self._begin()
            rows = self._builder.expert_conversion(self._span(op.x), route, tiles.handle, by=None)
        return int(rows)

    def _lower_Combine(self, op: ops.Combine) -> None:
        route, _ = self._routes[op.weights_value]
        self._builder.combine(
            self._span(op.x), self._span(op.weights_value), self._span(op.out), route
        )

    def _optional(self, weight: Weight | None) -> NDArray[np.float32] | None:
        return None if weight is None else self._floats(weight)


def _executor_axis(axis: str) -> str:
    return HEAD if axis == "requests" else axis


def _cut(span: Span, column: int, width: int) -> Span:
    """Some neighbouring columns of a span."""
    axis, offset, _ = span
    return (axis, offset + column, width)
