"""Shard pass (tensor parallelism): the part of a Program that one rank computes.

Matmuls before heads and activations are split by outputs. Matmuls after them are split by inputs,
which yields partial sums; AllReduce adds these when an op needs complete rows. Heads and their KV,
the vocabulary and expert widths are split; norms, routers and latents are replicated. Runs before
fuse. Unsupported ops raise ConfigError. Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.program import expert_ops, family_ops, ops, rank_ops
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.passes.splits import (
    Even,
    Spans,
    UnitOf,
    find_required_splits,
    head_spans,
    is_by_heads,
    is_split,
    kv_spans,
    query_spans,
    shares,
    split_error,
    times,
)
from octavo.program.program import CacheGroup, Op, Program, Span, Value, Weight

UNPACK = "use fewer ranks, or --dtype bfloat16, which unpacks the weights"


def split_anywhere(weight: Weight) -> int:
    """The `UnitOf` for plain floats, which may be split anywhere."""
    return 1


def shard(program: Program, rank: int, num_ranks: int, unit_of: UnitOf = split_anywhere) -> Program:
    """Returns the part that rank `rank` of `num_ranks` computes; raises ConfigError if an op cannot
    be split.
    """
    return program if num_ranks == 1 else _Sharder(program, rank, num_ranks, unit_of).run()


@dataclass(frozen=True, slots=True)
class _Held:
    """One rank's part of a Value: the complete Value, the columns `spans[rank]`, or a partial sum
    (`partial`).
    """

    value: Value
    spans: Spans | None = None
    partial: bool = False


class _Sharder:
    def __init__(self, program: Program, rank: int, num_ranks: int, unit_of: UnitOf) -> None:
        self._program = program
        self._rank = rank
        self._num_ranks = num_ranks
        self._unit_of = unit_of
        self._splits = find_required_splits(program, num_ranks, unit_of)
        self._held = {value: _Held(value) for value in program.inputs.values()}
        self._ops: list[Op] = []

    def run(self) -> Program:
        for op in self._program.ops:
            getattr(self, f"_shard_{op.kind}")(op)
        outputs = {name: self._whole(value) for name, value in self._program.outputs.items()}
        groups = tuple(map(self._group, self._program.groups))
        sharded = replace(self._program, outputs=outputs, groups=groups, ops=tuple(self._ops))
        sharded.check()
        return sharded

    def _group(self, group: CacheGroup) -> CacheGroup:
        if group.kind == "state":
            return group
        first, last = kv_spans(group, self._num_ranks)[self._rank]
        return replace(group, num_kv_heads=last - first)

    # -- Values ------------------------------------------------------------------------------------

    def _make(self, value: Value, spans: Spans | None = None, *, partial: bool = False) -> Value:
        """Records this rank's part of a Value that the next op computes, and returns the part's
        Value.
        """
        own = value if spans is None else replace(value, width=_width(spans[self._rank]))
        self._held[value] = _Held(own, spans, partial)
        return own

    def _whole(self, value: Value) -> Value:
        """Returns the Value with all columns, adding an AllReduce or AllGather on first use."""
        partition = self._held[value]
        if not partition.partial and partition.spans is None:
            return partition.value
        whole = replace(value, name=f"{value.name}.{'sum' if partition.partial else 'all'}")
        if partition.spans is None:
            self._ops.append(rank_ops.AllReduce(partition.value, whole))
        else:
            self._ops.append(
                rank_ops.AllGather(partition.value, whole, tuple(map(_width, partition.spans)))
            )
        self._held[value] = _Held(whole)
        return whole

    def _columns(self, value: Value, spans: Spans, op: Op) -> Value:
        """Returns this rank's columns; raises ConfigError if they are not the columns that the op
        needs.
        """
        partition = self._held[value]
        if partition.spans != spans:
            what = f"{op.kind} reads {value.name}, which cannot be split by heads"
            raise split_error(what, hint="set tensor_parallel_size to 1")
        return partition.value

    def _alike(self, values: Sequence[Value]) -> tuple[list[Value], Spans | None]:
        """Returns all Values with the same columns, and their spans; the spans are None if the
        Values have all columns.
        """
        partitions = [self._held[value] for value in values]
        if all(one.spans == partitions[0].spans and not one.partial for one in partitions):
            return [one.value for one in partitions], partitions[0].spans
        return list(map(self._whole, values)), None

    def _spans(self, out: Value) -> Spans | None:
        """Returns how a matmul's output is split; None: not split."""
        split = self._splits.get(out)
        if split is None or not is_split(split):
            return None
        if not isinstance(split, Even):
            return split if isinstance(split, tuple) else None
        if out.width < self._num_ranks * split.unit:
            what = (
                f"got {self._num_ranks}, but {out.name} has {out.width} columns, which can only be"
                f" split at multiples of {split.unit}"
            )
            raise split_error(what, hint=UNPACK if split.unit > 1 else f"use at most {out.width}")
        return shares(out.width, self._num_ranks, split.unit)

    # -- matmuls ----------------------------------------------------------------------------------

    def _shard_Linear(self, op: ops.Linear) -> None:
        assert op.norm is None and op.gate is None and op.residual is None, "shard runs before fuse"
        spans = self._held[op.x].spans
        if spans is not None and not any(is_split(self._splits.get(out)) for out in op.outs):
            self._along_inputs(op, spans)
        else:
            self._along_outputs(op)

    def _along_outputs(self, op: ops.Linear) -> None:
        x = self._whole(op.x)
        if not any(is_split(self._splits.get(out)) for out in op.outs):
            self._ops.append(replace(op, x=x, outs=tuple(map(self._make, op.outs))))
            return
        if [out.width for out in op.outs] != [weight.shape[0] for weight in op.weights_]:
            raise split_error(
                f"{op.weights_[0].name} and the outputs of its matmul do not match",
                hint="set tensor_parallel_size to 1",
            )
        spans = [self._spans(out) for out in op.outs]
        outs = tuple(map(self._make, op.outs, spans))
        weights = tuple(map(self._rows, op.weights_, spans))
        biases = tuple(
            None if bias is None else self._rows(bias, cut)
            for bias, cut in zip(op.biases, spans, strict=False)
        )
        self._ops.append(replace(op, x=x, outs=outs, weights_=weights, biases=biases))

    def _along_inputs(self, op: ops.Linear, spans: Spans) -> None:
        """Splits a matmul by inputs, which yields partial sums.

        Only the first rank adds biases; activations follow the sum.
        """
        outs = tuple(self._make(out, partial=True) for out in op.outs)
        weights = tuple(self._inputs(weight, spans) for weight in op.weights_)
        biases = op.biases if self._rank == 0 else ()
        self._ops.append(
            replace(
                op,
                x=self._held[op.x].value,
                outs=outs,
                weights_=weights,
                biases=biases,
                activation=None,
            )
        )
        if op.activation is not None:
            for out in op.outs:
                gated = replace(out, name=f"{out.name}.{op.activation}")
                self._ops.append(ops.Act(self._whole(out), gated, op.activation))
                self._held[out] = _Held(gated)

    def _shard_GroupedLinear(self, op: expert_ops.GroupedLinear) -> None:
        partition, ids = self._held[op.x], self._whole(op.ids)
        if partition.spans is not None and not is_split(self._splits.get(op.out)):
            weight, bias = (
                self._inputs(op.weight, partition.spans),
                op.bias if self._rank == 0 else None,
            )
            self._ops.append(
                expert_ops.GroupedLinear(
                    partition.value, ids, self._make(op.out, partial=True), weight, bias
                )
            )
            return
        x, spans = self._whole(op.x), self._spans(op.out)
        bias = None if op.bias is None else self._rows(op.bias, spans)
        self._ops.append(
            expert_ops.GroupedLinear(
                x, ids, self._make(op.out, spans), self._rows(op.weight, spans), bias
            )
        )

    def _rows(self, weight: Weight, spans: Spans | None) -> Weight:
        return weight if spans is None else weight.part(rows=spans[self._rank])

    def _inputs(self, weight: Weight, spans: Spans) -> Weight:
        unit = self._unit_of(weight)
        cut = next((last for _, last in spans[:-1] if last % unit), None)
        if cut is not None:
            what = (
                f"got {self._num_ranks}, which splits {weight.name} at input {cut}, but its scales"
                f" are of {unit} inputs each"
            )
            raise split_error(what, hint=UNPACK)
        return weight.part(inputs=spans[self._rank])

    def _shard_Embedding(self, op: ops.Embedding) -> None:
        """Splits a token table by rows; a position table is small and replicated."""
        if op.ids is None:
            self._ops.append(replace(op, out=self._make(op.out)))
            return
        if op.others_first:
            raise split_error(
                f"{op.table.name} has per-layer columns, which cannot be split",
                hint="set tensor_parallel_size to 1",
            )
        if op.table.shape[0] < self._num_ranks:
            raise split_error(
                f"got {self._num_ranks}, but the vocabulary has {op.table.shape[0]} tokens",
                hint="use fewer ranks",
            )
        rows = shares(op.table.shape[0], self._num_ranks)[self._rank]
        out = self._make(op.out, partial=True)
        self._ops.append(
            replace(
                op,
                out=out,
                table=op.table.part(rows=rows),
                ids=self._whole(op.ids),
                first_row=rows[0],
            )
        )

    # -- attention ---------------------------------------------------------------------------------

    def _shard_PositionScores(self, op: family_ops.PositionScores) -> None:
        raise split_error(
            f"{op.kind} computes scores across heads", hint="set tensor_parallel_size to 1"
        )

    def _shard_Attention(self, op: ops.Attention) -> None:
        group = self._program.group(op.group)
        heads = query_spans(op.num_heads, group, self._num_ranks)
        own = heads[self._rank]
        bias = op.bias
        if isinstance(bias, ops.T5Bias):
            bias = replace(bias, table=bias.table.part(inputs=own))
        elif isinstance(bias, ops.AlibiBias):
            bias = ops.AlibiBias(bias.slopes[slice(*own)])
        self._ops.append(
            replace(
                op,
                q=self._columns(op.q, times(heads, group.k_width), op),
                out=self._make(op.out, times(heads, group.v_width)),
                num_heads=_width(own),
                sinks=None if op.sinks is None else op.sinks.part(rows=own),
                bias=bias,
            )
        )

    def _shard_MlaAttention(self, op: ops.MlaAttention) -> None:
        heads = head_spans(op.num_heads, self._num_ranks)
        self._ops.append(
            replace(
                op,
                q_nope=self._columns(op.q_nope, times(heads, op.nope_width), op),
                q_rope=self._columns(op.q_rope, times(heads, op.rope_width), op),
                out=self._make(op.out, times(heads, op.v_width)),
                kv_b=op.kv_b.part(rows=times(heads, op.nope_width + op.v_width)[self._rank]),
                num_heads=_width(heads[self._rank]),
            )
        )

    def _shard_KvWrite(self, op: ops.KvWrite) -> None:
        group = self._program.group(op.group)
        if group.num_kv_heads == 1:
            self._ops.append(
                replace(
                    op,
                    k_parts=tuple(map(self._whole, op.k_parts)),
                    v=None if op.v is None else self._whole(op.v),
                )
            )
            return
        heads = kv_spans(group, self._num_ranks)

        def own(value: Value) -> Value:
            return self._columns(value, times(heads, value.width // group.num_kv_heads), op)

        self._ops.append(
            replace(op, k_parts=tuple(map(own, op.k_parts)), v=None if op.v is None else own(op.v))
        )

    def _shard_mixer(self, op: ShortConv | SelectiveScan) -> None:
        """Replicates the op, like the rows or states of its group."""
        values = {value: self._whole(value) for value in op.inputs}
        values |= {value: self._make(value) for value in op.outputs}
        self._ops.append(op.on(values))

    _shard_ShortConv = _shard_SelectiveScan = _shard_mixer

    def _shard_Rope(self, op: ops.Rope) -> None:
        (x,), spans = self._alike([op.x])
        self._ops.append(
            replace(op, x=x, out=self._make(op.out, spans), num_heads=x.width // op.head_width)
        )

    # -- row by row --------------------------------------------------------------------------------

    def _shard_RmsNorm(self, op: ops.RmsNorm) -> None:
        by_heads = is_by_heads(op)
        (x,), spans = self._alike([op.x]) if by_heads else ([self._whole(op.x)], None)
        self._ops.append(replace(op, x=x, out=self._make(op.out, spans)))

    def _shard_LayerNorm(self, op: ops.LayerNorm) -> None:
        self._ops.append(replace(op, x=self._whole(op.x), out=self._make(op.out)))

    def _shard_linear_op(self, op: ops.Scale | ops.GatherRows | ops.PoolRows) -> None:
        partition = self._held[op.x]
        self._ops.append(
            replace(
                op,
                x=partition.value,
                out=self._make(op.out, partition.spans, partial=partition.partial),
            )
        )

    _shard_Scale = _shard_GatherRows = _shard_PoolRows = _shard_linear_op

    def _shard_column_op(self, op: ops.Act | ops.SoftCap | ops.Clip | family_ops.Xielu) -> None:
        (x,), spans = self._alike([op.x])
        self._ops.append(replace(op, x=x, out=self._make(op.out, spans)))

    _shard_Act = _shard_SoftCap = _shard_Clip = _shard_Xielu = _shard_column_op

    def _shard_whole_row_op(
        self,
        op: family_ops.MatchMagnitude
        | family_ops.KeepLargest
        | family_ops.Mix
        | family_ops.Concat
        | family_ops.SelectColumns,
    ) -> None:
        """Replicates an op that reads complete rows."""
        whole = op.on({value: self._whole(value) for value in op.inputs})
        for out in op.outputs:
            self._make(out)
        self._ops.append(whole)

    _shard_MatchMagnitude = _shard_KeepLargest = _shard_whole_row_op
    _shard_Mix = _shard_Concat = _shard_SelectColumns = _shard_whole_row_op

    def _shard_ActMul(self, op: ops.ActMul) -> None:
        (gate, up), spans = self._alike([op.gate, op.up])
        self._ops.append(replace(op, gate=gate, up=up, out=self._make(op.out, spans)))

    def _shard_Add(self, op: ops.Add) -> None:
        """The sum of two partial sums is a partial sum."""
        a, b = self._held[op.a], self._held[op.b]
        if a.partial and b.partial:
            self._ops.append(ops.Add(a.value, b.value, self._make(op.out, partial=True)))
            return
        (x, y), spans = self._alike([op.a, op.b])
        self._ops.append(ops.Add(x, y, self._make(op.out, spans)))

    def _shard_Mul(self, op: ops.Mul) -> None:
        """A partial sum times a replicated Value is a partial sum."""
        a, b = self._held[op.a], self._held[op.b]
        span = op.a.width // op.b.width
        if span > 1 and a.spans is not None and b.spans is not None:
            if times(b.spans, span) == a.spans:
                self._ops.append(ops.Mul(a.value, b.value, self._make(op.out, a.spans)))
                return
            a = _Held(self._whole(op.a))
        if a.partial or op.b.width == 1:
            self._ops.append(
                ops.Mul(a.value, self._whole(op.b), self._make(op.out, a.spans, partial=a.partial))
            )
            return
        (x, y), spans = self._alike([op.a, op.b])
        self._ops.append(ops.Mul(x, y, self._make(op.out, spans)))

    # -- experts -----------------------------------------------------------------------------------

    def _shard_Route(self, op: expert_ops.Route) -> None:
        rows, ids, weights = op.outs
        outs = (self._make(rows), self._make(ids), self._make(weights))
        self._ops.append(replace(op, x=self._whole(op.x), logits=self._whole(op.logits), outs=outs))

    def _shard_Dispatch(self, op: rank_ops.Dispatch) -> None:
        rows = None if op.rows is None else self._whole(op.rows)
        outs = tuple(self._make(out) for out in op.outs)
        ids = self._whole(op.ids)
        self._ops.append(replace(op, ids=ids, out=self._make(op.out), rows=rows, outs=outs))

    def _shard_Collect(self, op: rank_ops.Collect) -> None:
        """Collects the part of the rows' columns that this rank has; the ranks with the other
        experts have the same part.
        """
        partition, ids = self._held[op.x], self._whole(op.ids)
        out = self._make(op.out, partition.spans, partial=partition.partial)
        self._ops.append(replace(op, x=partition.value, ids=ids, out=out))

    def _shard_Combine(self, op: expert_ops.Combine) -> None:
        partition, weights = self._held[op.x], self._whole(op.weights_value)
        self._ops.append(
            expert_ops.Combine(
                partition.value,
                weights,
                self._make(op.out, partition.spans, partial=partition.partial),
            )
        )

    def _shard_ScatterRows(self, op: ops.ScatterRows) -> None:
        self._ops.append(
            replace(
                op, base=None if op.base is None else self._whole(op.base), out=self._make(op.out)
            )
        )


def _width(span: Span) -> int:
    return span[1] - span[0]
