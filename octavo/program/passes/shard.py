"""Shard pass (tensor parallelism): the part of a Program that one rank computes.

Matmuls are split by outputs, never by inputs, so one rank sums all inputs of an output in the order
of a single process: results do not depend on the number of ranks. AllGather joins columns when an
op needs complete rows. Heads and their KV, the vocabulary and expert widths are split; norms,
routers and latents are replicated. Runs before fuse. Unsupported ops raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.program import expert_ops, family_ops, ops, rank_ops
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.passes.splits import (
    Spans,
    Whole,
    find_required_splits,
    head_spans,
    is_by_heads,
    kv_spans,
    query_spans,
    shares,
    split_error,
    times,
)
from octavo.program.program import CacheGroup, Op, Program, Span, Value, Weight


def shard(program: Program, rank: int, num_ranks: int) -> Program:
    """Returns the part that rank `rank` of `num_ranks` computes; raises ConfigError if an op cannot
    be split.
    """
    return program if num_ranks == 1 else _Sharder(program, rank, num_ranks).run()


@dataclass(frozen=True, slots=True)
class _Held:
    """One rank's part of a Value: the complete Value, or the columns `spans[rank]`."""

    value: Value
    spans: Spans | None = None


class _Sharder:
    def __init__(self, program: Program, rank: int, num_ranks: int) -> None:
        self._program = program
        self._rank = rank
        self._num_ranks = num_ranks
        self._splits = find_required_splits(program, num_ranks)
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

    def _make(self, value: Value, spans: Spans | None = None) -> Value:
        """Records this rank's part of a Value that the next op computes, and returns the part's
        Value.
        """
        own = value if spans is None else replace(value, width=_width(spans[self._rank]))
        self._held[value] = _Held(own, spans)
        return own

    def _whole(self, value: Value) -> Value:
        """Returns the Value with all columns, adding an AllGather on first use."""
        partition = self._held[value]
        if partition.spans is None:
            return partition.value
        whole = replace(value, name=f"{value.name}.all")
        widths = tuple(map(_width, partition.spans))
        self._ops.append(rank_ops.AllGather(partition.value, whole, widths))
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
        if all(one.spans == partitions[0].spans for one in partitions):
            return [one.value for one in partitions], partitions[0].spans
        return list(map(self._whole, values)), None

    def _spans(self, out: Value, x: Value) -> Spans | None:
        """Returns how the output of a matmul of x is split; None: not split.

        An output that is needed completely is split too if its input is, so that each rank has a
        part of the weight.
        """
        split = self._splits.get(out, Whole())
        if isinstance(split, tuple):
            return split
        if isinstance(split, Whole):
            is_shared = self._held[x].spans is not None and out.width >= self._num_ranks
            return shares(out.width, self._num_ranks) if is_shared else None
        if out.width < self._num_ranks * split.unit:
            what = (
                f"got {self._num_ranks}, but {out.name} has {out.width} columns, which can only be"
                f" split at multiples of {split.unit}"
            )
            hint = f"use at most {max(out.width // split.unit, 1)}"
            raise split_error(what, hint=hint)
        return shares(out.width, self._num_ranks, split.unit)

    # -- matmuls ----------------------------------------------------------------------------------

    def _shard_Linear(self, op: ops.Linear) -> None:
        assert op.norm is None and op.gate is None and op.residual is None, "shard runs before fuse"
        spans = [self._spans(out, op.x) for out in op.outs]
        x = self._whole(op.x)
        if not any(spans):
            self._ops.append(replace(op, x=x, outs=tuple(map(self._make, op.outs))))
            return
        if [out.width for out in op.outs] != [weight.shape[0] for weight in op.weights_]:
            raise split_error(
                f"{op.weights_[0].name} and the outputs of its matmul do not match",
                hint="set tensor_parallel_size to 1",
            )
        outs = tuple(map(self._make, op.outs, spans))
        weights = tuple(map(self._rows, op.weights_, spans))
        biases = tuple(
            None if bias is None else self._rows(bias, cut)
            for bias, cut in zip(op.biases, spans, strict=False)
        )
        self._ops.append(replace(op, x=x, outs=outs, weights_=weights, biases=biases))

    def _shard_GroupedLinear(self, op: expert_ops.GroupedLinear) -> None:
        spans = self._spans(op.out, op.x)
        x, ids = self._whole(op.x), self._whole(op.ids)
        bias = None if op.bias is None else self._rows(op.bias, spans)
        weight = self._rows(op.weight, spans)
        out = self._make(op.out, spans)
        self._ops.append(expert_ops.GroupedLinear(x, ids, out, weight, bias))

    def _rows(self, weight: Weight, spans: Spans | None) -> Weight:
        return weight if spans is None else weight.part(rows=spans[self._rank])

    def _shard_Embedding(self, op: ops.Embedding) -> None:
        """Splits a token table by rows; a position table is small and replicated.

        The rows of other ranks are zeros, so their sum is exact.
        """
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
        out = self._make(op.out)
        own = replace(op.out, name=f"{op.out.name}.own")
        table, ids = op.table.part(rows=rows), self._whole(op.ids)
        self._ops.append(replace(op, out=own, table=table, ids=ids, first_row=rows[0]))
        self._ops.append(rank_ops.AllReduce(own, out))

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

    def _shard_column_op(
        self,
        op: ops.Scale
        | ops.SoftCap
        | ops.Clip
        | ops.Act
        | ops.GatherRows
        | ops.PoolRows
        | family_ops.Xielu,
    ) -> None:
        (x,), spans = self._alike([op.x])
        self._ops.append(replace(op, x=x, out=self._make(op.out, spans)))

    _shard_Scale = _shard_SoftCap = _shard_Clip = _shard_Act = _shard_column_op
    _shard_GatherRows = _shard_PoolRows = _shard_Xielu = _shard_column_op

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
        (x, y), spans = self._alike([op.a, op.b])
        self._ops.append(ops.Add(x, y, self._make(op.out, spans)))

    def _shard_Mul(self, op: ops.Mul) -> None:
        a, b = self._held[op.a], self._held[op.b]
        span = op.a.width // op.b.width
        if span > 1 and a.spans is not None and b.spans is not None:
            if times(b.spans, span) == a.spans:
                self._ops.append(ops.Mul(a.value, b.value, self._make(op.out, a.spans)))
                return
            a = _Held(self._whole(op.a))
        if op.b.width == 1:
            self._ops.append(ops.Mul(a.value, self._whole(op.b), self._make(op.out, a.spans)))
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
        out = self._make(op.out, partition.spans)
        self._ops.append(replace(op, x=partition.value, ids=ids, out=out))

    def _shard_Combine(self, op: expert_ops.Combine) -> None:
        partition, weights = self._held[op.x], self._whole(op.weights_value)
        self._ops.append(
            expert_ops.Combine(
                partition.value,
                weights,
                self._make(op.out, partition.spans),
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
