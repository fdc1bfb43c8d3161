"""Lowering of row-wise ops, which run one after another within a stage."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.executor.native.hidden import HiddenIn, HiddenOut
from octavo.executor.native.lowering_context import LoweringContext, Span
from octavo.program import family_ops, ops
from octavo.program.program import Value, Weight


class RowLowering:
    """Adds row-wise ops to the builder; `lower_X` lowers op `X`."""

    def __init__(self, context: LoweringContext) -> None:
        self._context, self._native = context, context.native
        self._program, self._weights = context.program, context.weights
        self._add, self._span = context.builder.add, context.span
        self._angles: dict[ops.RopeTable, int] = {}
        """The builder's index of each RoPE table."""

    def lower_Embedding(self, op: ops.Embedding) -> None:
        sites = self._context.add_sites([(op.site, op.table)] if op.site else [])
        self._add(
            self._native.EmbeddingSpec(
                table=self._weights.table(op.table).handle,
                out=self._span(op.out),
                scale=op.scale,
                by_position=op.by_position,
                offset=op.offset,
                axis=op.axis,
                first_row=op.first_row,
                site=sites[0] if sites else None,
            )
        )

    def lower_RmsNorm(self, op: ops.RmsNorm) -> None:
        self._norm(op, None, centered=False)

    def lower_LayerNorm(self, op: ops.LayerNorm) -> None:
        self._norm(op, op.bias, centered=True)

    def _norm(
        self, op: ops.RmsNorm | ops.LayerNorm, bias: Weight | None, *, centered: bool
    ) -> None:
        norm = self._context.norm_spec(
            op.weight, bias, eps=op.eps, weight_offset=op.weight_offset, centered=centered
        )
        self._add(
            self._native.RowNormSpec(
                x=self._span(op.x),
                out=self._span(op.out),
                norm=norm,
                group_width=op.group_width,
                each_group=op.weight.shape[0] > (op.group_width or op.x.width),
            )
        )

    def lower_Rope(self, op: ops.Rope) -> None:
        if op.table not in self._angles:
            self._angles[op.table] = self._add(self._angles_spec(op.table))
        self._add(
            self._native.RopeSpec(
                x=self._span(op.x),
                out=self._span(op.out),
                num_heads=op.num_heads,
                head_width=op.head_width,
                rotary_dim=op.rotary_dim,
                rotary_start=op.rotary_start,
                interleaved=op.style == "interleaved",
                angles=self._angles[op.table],
                axes=list(op.table.axes),
            )
        )

    def _angles_spec(self, table: ops.RopeTable) -> Any:
        long = table.long or ops.LongAngles(0, ())
        return self._native.AnglesSpec(
            inv_freq=list(table.inv_freq),
            mscale=table.mscale,
            long_start=long.start,
            long_inv_freq=list(long.inv_freq),
            long_mscale=long.mscale,
        )

    def lower_KvWrite(self, op: ops.KvWrite) -> None:
        group = self._program.group(op.group)
        v = op.k_parts[0] if group.kind == "conv" else op.v  # its rows have the layout of values
        self._add(
            self._native.KvWriteSpec(
                k_parts=[self._span(part) for part in op.k_parts],
                v=self._context.span_or_none(v),
                group=self._program.group_index(op.group),
                layer=op.layer,
            )
        )

    def lower_Add(self, op: ops.Add) -> None:
        self._elementwise("add", op.a, op.b, op.out)

    def lower_Mul(self, op: ops.Mul) -> None:
        self._elementwise("mul", op.a, op.b, op.out)

    def lower_Scale(self, op: ops.Scale) -> None:
        self._elementwise("scale", op.x, op.x, op.out, factor=op.factor)

    def lower_SoftCap(self, op: ops.SoftCap) -> None:
        self._elementwise("softcap", op.x, op.x, op.out, factor=op.cap)

    def lower_Clip(self, op: ops.Clip) -> None:
        self._elementwise("clip", op.x, op.x, op.out, factor=op.limit)

    def lower_MatchMagnitude(self, op: family_ops.MatchMagnitude) -> None:
        self._elementwise("match", op.x, op.like, op.out, factor=op.least)

    def lower_KeepLargest(self, op: family_ops.KeepLargest) -> None:
        self._elementwise("largest", op.x, op.x, op.out, factor=op.deviations)

    def lower_Xielu(self, op: family_ops.Xielu) -> None:
        names = ("alpha_p", "alpha_n", "beta", "eps")
        alpha_p, alpha_n, beta, eps = (
            float(self._weights.floats(getattr(op, name))[0]) for name in names
        )
        self._add(
            self._native.XieluSpec(
                x=self._span(op.x),
                out=self._span(op.out),
                positive=float(np.logaddexp(alpha_p, 0.0)),
                negative=beta + float(np.logaddexp(alpha_n, 0.0)),
                beta=beta,
                eps=eps,
            )
        )

    def lower_Mix(self, op: family_ops.Mix) -> None:
        self._add(
            self._native.MixSpec(
                xs=[self._span(value) for value in op.xs],
                bases=[self._span(value) for value in op.bases],
                outs=[self._span(value) for value in op.outs],
                coefs=self._span(op.coefs),
                offset=op.offset,
            )
        )

    def lower_Concat(self, op: family_ops.Concat) -> None:
        axis, start, _ = self._span(op.out)
        for x in op.xs:
            self._copy(self._span(x), (axis, start, x.width))
            start += x.width

    def lower_SelectColumns(self, op: family_ops.SelectColumns) -> None:
        axis, start, _ = self._span(op.x)
        self._copy((axis, start + op.start, op.out.width), self._span(op.out))

    def _copy(self, source: Span, out: Span) -> None:
        self._add(
            self._native.ElementwiseSpec(
                kind="scale", a=source, b=source, out=out, factor=1.0, gate=None
            )
        )

    def lower_Act(self, op: ops.Act) -> None:
        self._elementwise("activate", op.x, op.x, op.out, gate=ops.Gate(op.activation))

    def lower_ActMul(self, op: ops.ActMul) -> None:
        gate = ops.Gate(op.activation, op.clamp, op.alpha, op.up_offset, op.threshold)
        self._elementwise("gate", op.gate, op.up, op.out, gate=gate)

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
        self._add(
            self._native.ElementwiseSpec(
                kind=kind,
                a=self._span(a),
                b=self._span(b),
                out=self._span(out),
                factor=factor,
                gate=self._context.gate_spec(gate),
            )
        )

    def lower_GatherRows(self, op: ops.GatherRows) -> None:
        self._add(self._native.GatherSpec(x=self._span(op.x), out=self._span(op.out)))

    def lower_ScatterRows(self, op: ops.ScatterRows) -> None:
        base = self._context.span_or_none(op.base)
        self._add(self._native.GivenSpec(base=base, out=self._span(op.out)))

    def lower_PoolRows(self, op: ops.PoolRows) -> None:
        self._add(self._native.PoolSpec(x=self._span(op.x), out=self._span(op.out), mode=op.mode))

    def lower_HiddenIn(self, op: HiddenIn) -> None:
        self._add(self._native.HiddenInSpec(out=self._span(op.out)))

    def lower_HiddenOut(self, op: HiddenOut) -> None:
        self._add(self._native.HiddenOutSpec(x=self._span(op.x)))
