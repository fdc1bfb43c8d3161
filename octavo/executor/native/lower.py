"""Lowering: turns a fused Program into a native plan, adding each op to the builder as a spec.

Also decides which op quantizes a matmul's activations and which weights are computed in one matmul.
Contains matmuls, attention, recurrences and collectives; row-wise ops are in lower_rows.py, experts
in lower_experts.py. check.py has rejected anything unsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.base import ObservedInputs
from octavo.executor.native.check import ACTIVATIONS, MAX_LANES
from octavo.executor.native.lower_experts import ExpertLowering
from octavo.executor.native.lower_rows import RowLowering
from octavo.executor.native.lowering_context import (
    GROUP,
    WHOLE_ROWS,
    LoweringContext,
    Span,
    cut_span,
)
from octavo.executor.native.native_hooks import NativeHooks, OpenedRecords
from octavo.executor.native.stages import sort_token_ops_first
from octavo.executor.native.states import StateBlocks
from octavo.executor.native.weights import NativeTiles, NativeWeights
from octavo.program import family_ops, ops, rank_ops
from octavo.program.low_rank import Site
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.position_tables import position_buckets
from octavo.program.program import CacheGroup, Op, Program, Value, Weight
from octavo.program.t5_buckets import t5_buckets

FloatsOf = Callable[[Weight], NDArray[np.float32]]
AnyBias = ops.T5Bias | ops.AlibiBias | ops.NearBias | ops.PositionBuckets


class Lowering:
    """Adds a Program's ops to the builder."""

    def __init__(
        self,
        program: Program,
        builder: Any,
        weights: NativeWeights,
        get_chunk: Callable[[Op], int | None] = lambda op: None,
        observed: ObservedInputs | None = None,
        *,
        records: OpenedRecords | None = None,
        hooks: Sequence[NativeHooks] = (),
    ) -> None:
        """`get_chunk` returns the streamed weight chunk of a matmul; `observed` collects the arrays
        that matmul inputs are copied to; `records` are read by extensions' ops.
        """
        self._observed = observed
        program = sort_token_ops_first(program)
        self._context = context = LoweringContext(program, builder, weights, get_chunk)
        self._program = program
        self._weights = weights
        self._native = context.native
        self._builder = builder
        self._add = builder.add
        self._span = context.span
        self._next_attentions = {
            at: op for each in hooks for at, op in each.next_attentions(program.ops).items()
        }
        of_records = None if records is None else records.lowering(context)
        self._experts = ExpertLowering(context)
        # Without itself, so that the weights' files are closed when it is dropped.
        self._other_parts = (RowLowering(context), self._experts, of_records)
        self._converted: set[Value] = set()
        """Values whose producer writes them in the form that their only reader, a matmul,
        expects.
        """

    @property
    def sites(self) -> list[Site]:
        """Adapter sites of the Program, in plan order."""
        return self._context.sites

    def run(self) -> Any:
        """Lowers all ops and returns the plan."""
        for op in self._program.ops:
            self._get_lowering(op)(op)
            self._context.before = op
        ((name, out),) = self._program.outputs.items()
        if name == "logits":
            self._add(self._native.SampleSpec(logits=self._span(out)))
        elif name != "hidden":  # its op has already written it
            self._add(self._native.OutputSpec(x=self._span(out)))
        return self._builder.build()

    def _get_lowering(self, op: Op) -> Callable[[Any], None]:
        name = f"lower_{op.kind}"
        part = next(part for part in (self, *self._other_parts) if hasattr(part, name))
        method: Callable[[Any], None] = getattr(part, name)
        return method

    # -- matmuls and attention ---------------------------------------------------------------------

    def lower_Linear(self, op: ops.Linear) -> None:
        gate = op.gate or (ops.Gate(op.activation) if op.activation else None)
        fuses_input = self._fuses_input(op)
        for parts, order in self._parts_by_rows(op, self._shrink(op)):
            observed = None
            if self._observed is not None:
                observed = np.zeros((self._observed.num_rows, op.x.width), np.float32)
                self._observed.inputs.update(dict.fromkeys(op.weights_, observed))
            self._add(
                self._native.LinearSpec(
                    x=self._span(op.x),
                    parts=parts,
                    norm=self._context.input_norm(op.norm, order),
                    permutation=None if order is None else order.tolist(),
                    threshold=op.threshold,
                    observed=observed,
                    fuses_input=fuses_input,
                    skips_zeros=op.skips_zeros,
                    gated=op.gate is not None,
                    gate=self._context.gate_spec(gate),
                    chunk=self._context.get_chunk(op),
                )
            )

    def _shrink(self, op: ops.Linear) -> list[int | None]:
        """Adds the LoRA shrink of a matmul's input; returns the site of each weight, None if it has
        none.
        """
        if not op.sites:
            return [None] * len(op.weights_)
        sites = self._context.add_sites(zip(op.sites, op.weights_, strict=True))
        self._add(
            self._native.ShrinkSpec(
                x=self._span(op.x), norm=self._context.input_norm(op.norm), sites=sites
            )
        )
        return list(sites)

    def _fuses_input(self, op: ops.Linear) -> bool:
        """Returns whether the previous op may write x in the form that this matmul reads.

        True only if no other op reads x and x is quantized in complete groups of 32.
        """
        before = self._context.before
        if (
            op.norm is not None
            or op.threshold
            or self._observed is not None
            or before is None
            or op.x not in before.outputs
            or self._context.num_readers[op.x] > 1
        ):
            return False
        tiles = self._product_tiles(op)
        row_types = {one.row_type for one in tiles}
        if len(row_types) > 1 or not row_types.isdisjoint(WHOLE_ROWS):
            return False
        if any(one.permutation is not None for one in tiles):
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
        self, op: ops.Linear, sites: list[int | None]
    ) -> list[tuple[list[Any], NDArray[np.int32] | None]]:
        """Groups weight parts whose activations have the same type and order, which are computed
        together; returns (parts, input order) pairs.
        """
        out, residual = self._span(op.outs[0]), self._context.span_or_none(op.residual)
        biases = op.biases or (None,) * len(op.weights_)
        groups: dict[tuple[str, bytes], tuple[list[Any], NDArray[np.int32] | None]] = {}
        column = 0
        for weight, tiles, bias, site in zip(
            op.weights_, self._product_tiles(op), biases, sites, strict=True
        ):
            width = weight.shape[0]
            part = self._native.LinearPart(
                weight=tiles.handle,
                out=cut_span(out, column, width),
                bias=self._context.floats_or_none(bias),
                residual=residual and cut_span(residual, column, width),
                site=site,
            )
            order = b"" if tiles.permutation is None else tiles.permutation.tobytes()
            groups.setdefault((tiles.row_type, order), ([], tiles.permutation))[0].append(part)
            column += 0 if op.gate is not None else width
        assert op.gate is None or len(groups) == 1, "check() refuses a gate and up of two row types"
        return list(groups.values())

    def _product_tiles(self, op: ops.Linear) -> list[NativeTiles]:
        """Returns the tiles of each weight; gate and up share an activation type."""
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
                    cut_span(self._span(op.q), first * q, heads * q),
                    cut_span(self._span(op.out), first * out, heads * out),
                )
        else:
            self._attention(op, op.num_heads, self._span(op.q), self._span(op.out))

    def _attention(self, op: ops.Attention, num_heads: int, q: Span, out: Span) -> None:
        ahead = self._next_attentions.get(id(op))
        self._add(
            self._native.AttentionSpec(
                q=q,
                out=out,
                group=self._program.group_index(op.group),
                layer=op.layer,
                num_heads=num_heads,
                window={"causal": 0, "full": -1}.get(op.mask, op.window or 0),
                chunks=op.mask == "chunk",
                scale=op.scale,
                softcap=op.softcap,
                sinks=self._context.floats_or_none(op.sinks),
                slopes=get_alibi_slopes(op.bias),
                distances=get_distance_bias(op.bias, self._weights.floats, num_heads),
                latent_width=op.latent_width,
                selection=self._selection(op),
                ahead=None if ahead is None else self._selection(ahead),
                ahead_layer=None if ahead is None else ahead.layer,
                **self._position_scores(op),
            )
        )

    def _selection(self, op: ops.Attention) -> Any:
        """Returns the key selection of sparse rows; None if all keys are read."""
        if op.selection is None or op.partial_q is None:
            return None
        return self._native.KeySelection(
            q=self._span(op.partial_q),
            group=self._program.group_index(op.selection.group),
            layer=op.selection.layer,
            budget=op.selection.budget,
        )

    def _position_scores(self, op: ops.Attention) -> dict[str, Any]:
        """Returns the position-score arguments of disentangled attention (DeBERTa): products of
        queries and of keys with position tables, and buckets by relative position.

        All None for other biases.
        """
        if not isinstance(op.bias, ops.PositionBuckets):
            return dict.fromkeys(("of_queries", "of_keys", "buckets"))
        assert op.of_queries is not None and op.of_keys is not None
        reach = op.bias.max_places - 1
        buckets = position_buckets(np.arange(-reach, reach + 1), op.bias)
        return {
            "of_queries": self._span(op.of_queries),
            "of_keys": self._span(op.of_keys),
            "buckets": buckets.tolist(),
        }

    def lower_PositionScores(self, op: family_ops.PositionScores) -> None:
        self._heads(op, self._weights.position_table(op))

    def lower_HeadLinear(self, op: ops.HeadLinear) -> None:
        self._heads(op, self._weights.heads(op), op.tail)

    def _heads(
        self,
        op: family_ops.PositionScores | ops.HeadLinear,
        tiles: Sequence[Any],
        tail: Value | None = None,
    ) -> None:
        self._add(
            self._native.HeadsSpec(
                x=self._span(op.x),
                out=self._span(op.out),
                tail=self._context.span_or_none(tail),
                weights=[head.handle for head in tiles],
                chunk=self._context.get_chunk(op),
            )
        )

    # -- ranks -------------------------------------------------------------------------------------

    def lower_AllReduce(self, op: rank_ops.AllReduce) -> None:
        self._collective(op, None)

    def lower_AllGather(self, op: rank_ops.AllGather) -> None:
        self._collective(op, list(op.widths))

    def _collective(
        self, op: rank_ops.AllReduce | rank_ops.AllGather, widths: list[int] | None
    ) -> None:
        self._add(
            self._native.CollectiveSpec(
                x=self._span(op.x),
                out=self._span(op.out),
                widths=widths,
                route=self._experts.get_route(op.x),
            )
        )

    # -- convolutions and recurrences --------------------------------------------------------------

    def lower_ShortConv(self, op: ShortConv) -> None:
        axis, offset, _ = self._span(op.outs[0])
        self._add(
            self._native.ShortConvSpec(
                x=self._span(op.x),
                out=(axis, offset, op.x.width),
                group=self._program.group_index(op.group),
                layer=op.layer,
                fills=self._fills(op),
                **convolution_parameters(op, self._weights.floats),
            )
        )

    def _fills(self, op: ShortConv) -> bool:
        """Returns whether the Program itself writes the rows that a convolution reads."""
        return any(
            isinstance(other, ops.KvWrite) and other.k_parts == (op.x,) and other.group == op.group
            for other in self._program.ops
        )

    def lower_SelectiveScan(self, op: SelectiveScan) -> None:
        values = {"x": op.x, "dt": op.dt, "b": op.b, "c": op.c, "out": op.out}
        self._add(
            self._native.ScanSpec(
                **{name: self._span(value) for name, value in values.items()},
                beta=self._context.span_or_none(op.beta),
                group=self._program.group_index(op.group),
                layer=op.layer,
                **scan_parameters(op, self._program.group(op.group), self._weights.floats),
            )
        )


def get_alibi_slopes(bias: AnyBias | None) -> NDArray[np.float32] | None:
    """Returns ALiBi slopes; None for other biases."""
    return np.array(bias.slopes, np.float32) if isinstance(bias, ops.AlibiBias) else None


def get_distance_bias(
    bias: AnyBias | None, floats: FloatsOf, num_heads: int
) -> NDArray[np.float32] | None:
    """Returns the bias per head and distance, `[H, 2 d + 1]`; it is constant beyond distance d.
    None for other biases.
    """
    if isinstance(bias, ops.NearBias):
        is_far = abs(np.arange(-bias.reach - 1, bias.reach + 2)) > bias.reach
        return np.tile(np.where(is_far, ops.FAR, 0.0).astype(np.float32), (num_heads, 1))
    if not isinstance(bias, ops.T5Bias):
        return None
    far = np.arange(-bias.max_distance, bias.max_distance + 1)
    return np.ascontiguousarray(floats(bias.table)[t5_buckets(far, bias)].T)


def convolution_parameters(op: ShortConv, floats: FloatsOf) -> dict[str, Any]:
    """Returns the weights of a convolution by tap, its bias and its activation."""
    weight = floats(op.weight)[:, 0]
    if op.factors:
        factors = np.repeat(np.array(op.factors, np.float32), [part.width for part in op.outs])
        weight = weight * factors[:, None]
    return {
        "weight": np.ascontiguousarray(weight.T),
        "bias": None if op.bias is None else floats(op.bias),
        "activation": -1 if op.activation is None else ACTIVATIONS.index(op.activation),
    }


def scan_parameters(op: SelectiveScan, group: CacheGroup, floats: FloatsOf) -> dict[str, Any]:
    """Returns the sizes and parameters of a scan, in lane layout."""
    lanes, bias = StateBlocks.of(group).by_lanes, op.dt_bias
    by_state = bias is not None and op.steps_by_state
    return {
        "state_size": op.state_size,
        "head_width": group.k_width,
        "decay": lanes(np.exp(floats(op.a_log))),
        "skip": lanes(np.zeros(op.num_heads, np.float32) if op.skip is None else floats(op.skip)),
        "bias": None if bias is None else floats(bias) if by_state else lanes(floats(bias)),
        "low": op.low,
        "high": op.high,
    }
