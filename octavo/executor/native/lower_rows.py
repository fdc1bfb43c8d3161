"""Lowering of the ops that compute each row by itself, one after the other within a stage."""

from __future__ import annotations

from octavo.executor.native.hidden import HiddenIn, HiddenOut
from octavo.executor.native.parameters import angles_parameters, gate_numbers, rope_parameters
from octavo.executor.native.stage_emitter import StageEmitter
from octavo.program import family_ops, ops
from octavo.program.program import Value


class RowLowering:
    """Tells the executor's builder of ops by rows; an op `X` is lowered by `lower_X`."""

    def __init__(self, emitter: StageEmitter) -> None:
        self._emitter = emitter
        self._program, self._weights = emitter.program, emitter.weights
        self._builder, self._span = emitter.builder, emitter.span
        self._angles: dict[ops.RopeTable, int] = {}
        """The executor's number of each rope table."""

    def lower_Embedding(self, op: ops.Embedding) -> None:
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
        self._emitter.sites.append((op.site, op.table))
        return int(self._builder.table_site())

    def lower_RmsNorm(self, op: ops.RmsNorm) -> None:
        norm = (self._weights.floats(op.weight), None, op.eps, op.weight_offset, False)
        each_group = op.weight.shape[0] > (op.group_width or op.x.width)
        self._builder.norm(
            self._span(op.x), self._span(op.out), norm, op.group_width, each_group=each_group
        )

    def lower_LayerNorm(self, op: ops.LayerNorm) -> None:
        bias = self._emitter.optional(op.bias)
        norm = (self._weights.floats(op.weight), bias, op.eps, op.weight_offset, True)
        each_group = op.weight.shape[0] > (op.group_width or op.x.width)
        self._builder.norm(
            self._span(op.x), self._span(op.out), norm, op.group_width, each_group=each_group
        )

    def lower_Rope(self, op: ops.Rope) -> None:
        if op.table not in self._angles:
            self._angles[op.table] = self._builder.angles(**angles_parameters(op.table))
        self._builder.rope(
            self._span(op.x),
            self._span(op.out),
            **rope_parameters(op),
            angles=self._angles[op.table],
            axes=list(op.table.axes),
        )

    def lower_KvWrite(self, op: ops.KvWrite) -> None:
        group = self._program.group(op.group)
        v = op.k_parts[0] if group.kind == "conv" else op.v  # its rows lie where values do
        parts, values = [self._span(part) for part in op.k_parts], v and self._span(v)
        self._builder.kv_write(parts, values, self._program.group_index(op.group), op.layer)

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

    def lower_Mix(self, op: family_ops.Mix) -> None:
        xs, bases, outs = (
            [self._span(value) for value in each] for each in (op.xs, op.bases, op.outs)
        )
        self._builder.mix(xs, bases, self._span(op.coefs), outs, op.offset)

    def lower_Act(self, op: ops.Act) -> None:
        self._elementwise("activate", op.x, op.x, op.out, gate=ops.Gate(op.activation))

    def lower_ActMul(self, op: ops.ActMul) -> None:
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

    def lower_GatherRows(self, op: ops.GatherRows) -> None:
        self._builder.gather(self._span(op.x), self._span(op.out))

    def lower_ScatterRows(self, op: ops.ScatterRows) -> None:
        base = None if op.base is None else self._span(op.base)
        self._builder.given(base, self._span(op.out))

    def lower_PoolRows(self, op: ops.PoolRows) -> None:
        self._builder.pool(self._span(op.x), self._span(op.out), op.mode)

    def lower_HiddenIn(self, op: HiddenIn) -> None:
        self._builder.hidden_in(self._span(op.out))

    def lower_HiddenOut(self, op: HiddenOut) -> None:
        self._builder.hidden_out(self._span(op.x))
