"""Lowering: a fused Program becomes calls on the native executor's builder, one for each op.

Decides which op converts a product's rows and which weights stand in one product; the stages are
those of stages.py. Here are products, attention, recurrences and sums over ranks; ops by rows are
in lower_rows.py, experts in lower_experts.py. Knows nothing of kernels; what these cannot do
check.py has refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.base import ObservedInputs
from octavo.executor.native.check import MAX_LANES
from octavo.executor.native.lower_experts import ExpertLowering
from octavo.executor.native.lower_rows import RowLowering
from octavo.executor.native.native_hooks import NativeHooks, OpenedRecords
from octavo.executor.native.parameters import (
    convolution_parameters,
    distances_of,
    gate_numbers,
    scan_parameters,
    slopes_of,
)
from octavo.executor.native.stage_emitter import GROUP, WHOLE_ROWS, Span, StageEmitter, Weights
from octavo.executor.native.stages import body_first
from octavo.program import family_ops, ops, rank_ops
from octavo.program.low_rank import Site
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.place_tables import place_buckets
from octavo.program.program import Op, Program, Value

LinearPart = tuple[Any, Span, NDArray[np.float32] | None, Span | None, int]
"""(tiles, columns of the out, bias, columns of the residual, site or -1) of one weight of a Linear.
"""


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
        records: OpenedRecords | None = None,
        hooks: Sequence[NativeHooks] = (),
    ) -> None:
        """`chunk_of` names the streamed chunk of weights that a product waits for; `observed` gets
        the arrays that inputs of products are copied to; `records` are those that ops of extensions
        read.
        """
        self._observed = observed
        program = body_first(program)
        self._emitter = emitter = StageEmitter(program, builder, weights, chunk_of)
        self._program, self._weights = program, weights
        self._builder, self._span = builder, emitter.span
        in_order = [op for stage in emitter.stages for op in stage.ops]
        self._next_attentions = {
            at: op for each in hooks for at, op in each.next_attentions(in_order).items()
        }
        parts = () if records is None else (records.lowering(emitter),)
        self._parts = (self, RowLowering(emitter), ExpertLowering(emitter), *parts)
        self._converted: set[Value] = set()
        """Values that the op which makes them writes as their one reader's product reads them."""

    @property
    def sites(self) -> list[Site]:
        """The Program's sites, in the executor's order."""
        return self._emitter.sites

    def run(self) -> None:
        """Tells the builder of all ops, and of what it is to return."""
        emitter = self._emitter
        for stage in emitter.stages:
            emitter.stage = stage
            if stage.is_row_local:
                emitter.begin_rows()
            for op in stage.ops:
                self._lowering_of(op)(op)
                emitter.before = op
        emitter.begin()
        ((name, out),) = self._program.outputs.items()
        if name == "hidden":
            pass  # its op has handed it over
        elif name == "logits":
            self._builder.sampling(self._span(out))
        else:
            self._builder.output(self._span(out))
        floats = emitter.plan.row_floats
        self._builder.finish(
            token_floats=floats.get("tokens", 0),
            block_floats=floats.get("block", 0),
            sample_floats=0 if name == "hidden" else floats.get(out.axis, 0),
            expert_floats=floats.get("expert_rows", 0),
        )

    def _lowering_of(self, op: Op) -> Callable[[Any], None]:
        """Returns the method that lowers an op of this kind."""
        name = f"lower_{op.kind}"
        part = next(part for part in self._parts if hasattr(part, name))
        method: Callable[[Any], None] = getattr(part, name)
        return method

    # -- products and attention --------------------------------------------------------------------

    def lower_Linear(self, op: ops.Linear) -> None:
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
            self._emitter.begin()
            self._emitter.await_weights(op)
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
        self._emitter.begin()
        self._emitter.sites += zip(op.sites, op.weights_, strict=True)
        return list(
            self._builder.shrink(
                self._span(op.x), self._emitter.norm(op.norm), num_sites=len(op.sites)
            )
        )

    def _convert(self, op: ops.Linear, tiles: Any, permutation: NDArray[np.int32] | None) -> int:
        """Converts x in the row ops right before the product, or in a stage of its own."""
        emitter = self._emitter
        if emitter.open_rows is None or emitter.open_rows.axis != emitter.stage.axis:
            emitter.begin_rows()
        order = [] if permutation is None else permutation.tolist()
        norm = self._emitter.norm(op.norm, permutation)
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
        before = self._emitter.before
        if (
            op.norm is not None
            or op.threshold
            or self._observed is not None
            or before is None
            or op.x not in before.outputs
            or self._emitter.num_readers[op.x] > 1
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
                self._emitter.optional(bias),
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

    def lower_Attention(self, op: ops.Attention) -> None:
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
        distances = distances_of(op.bias, self._weights.floats, num_heads)
        self._emitter.begin()
        self._builder.attention(
            q,
            out,
            group=self._program.group_index(op.group),
            layer=op.layer,
            num_heads=num_heads,
            window=window,
            chunks=op.mask == "chunk",
            scale=op.scale,
            softcap=op.softcap or 0.0,
            sinks=self._emitter.optional(op.sinks),
            slopes=slopes_of(op.bias),
            distances=distances,
            reach=0 if distances is None else distances.shape[1] // 2,
            latent_width=op.latent_width,
            by_places=self._by_places(op),
            selection=self._selection(op),
            ahead=self._ahead(op),
        )

    def _selection(self, op: ops.Attention) -> tuple[Span, int, int, float] | None:
        """Returns the partial queries, the group and layer of the partial keys, and the share of
        the blocks that sparse rows read; None where they read all.
        """
        if op.selection is None or op.partial_q is None:
            return None
        group = self._program.group_index(op.selection.group)
        return (self._span(op.partial_q), group, op.selection.layer, op.selection.budget)

    def _ahead(self, op: ops.Attention) -> tuple[tuple[Span, int, int, float], int] | None:
        """Returns what the next attention chooses by, and its layer, where that is known by now and
        what it chooses may be in a file.
        """
        found = self._next_attentions.get(id(op))
        selection = None if found is None else self._selection(found)
        return None if found is None or selection is None else (selection, found.layer)

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

    def lower_PlaceScores(self, op: family_ops.PlaceScores) -> None:
        self._emitter.begin()
        tiles = [each.handle for each in self._weights.place_table(op)]
        self._builder.heads(self._span(op.x), self._span(op.out), None, tiles)

    def lower_HeadLinear(self, op: ops.HeadLinear) -> None:
        self._emitter.begin()
        self._emitter.await_weights(op)
        self._builder.heads(
            self._span(op.x),
            self._span(op.out),
            None if op.tail is None else self._span(op.tail),
            [tiles.handle for tiles in self._weights.heads(op)],
        )

    # -- ranks -------------------------------------------------------------------------------------

    def lower_AllReduce(self, op: rank_ops.AllReduce) -> None:
        self._emitter.begin()
        self._builder.all_reduce(self._span(op.x), self._span(op.out))

    def lower_AllGather(self, op: rank_ops.AllGather) -> None:
        self._emitter.begin()
        self._builder.all_gather(self._span(op.x), self._span(op.out), list(op.widths))

    # -- convolutions and recurrences --------------------------------------------------------------

    def lower_ShortConv(self, op: ShortConv) -> None:
        axis, offset, _ = self._span(op.outs[0])
        self._emitter.begin()
        self._builder.short_conv(
            self._span(op.x),
            (axis, offset, op.x.width),
            group=self._program.group_index(op.group),
            layer=op.layer,
            fills=self._fills(op),
            **convolution_parameters(op, self._weights.floats),
        )

    def _fills(self, op: ShortConv) -> bool:
        """Returns whether the Program itself writes the rows that a convolution reads."""
        return any(
            isinstance(other, ops.KvWrite) and other.k_parts == (op.x,) and other.group == op.group
            for other in self._program.ops
        )

    def lower_SelectiveScan(self, op: SelectiveScan) -> None:
        self._emitter.begin()
        self._builder.selective_scan(
            *map(self._span, (op.x, op.dt, op.b, op.c, op.out)),
            beta=None if op.beta is None else self._span(op.beta),
            group=self._program.group_index(op.group),
            layer=op.layer,
            **scan_parameters(op, self._program.group(op.group), self._weights.floats),
        )


def _cut(span: Span, column: int, width: int) -> Span:
    """Some neighbouring columns of a span."""
    axis, offset, _ = span
    return (axis, offset + column, width)
