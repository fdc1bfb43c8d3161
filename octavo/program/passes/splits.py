"""Determines how each Value of a Program is split over ranks, from its readers' requirements.

Processes ops from last to first: attention needs complete heads; a matmul whose outputs are needed
completely gathers any columns of its input; a full-row norm needs all columns. `shard.py` rewrites
the ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from octavo.api.errors import ConfigError
from octavo.program import expert_ops, family_ops, ops, rank_ops
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.program import CacheGroup, Op, Program, Span, Value

Spans = tuple[Span, ...]
"""Columns of each rank; spans of KV heads overlap if there are fewer heads than ranks."""


@dataclass(frozen=True, slots=True)
class Even:
    """Accepts any columns whose boundaries are multiples of `unit`."""

    unit: int = 1


@dataclass(frozen=True, slots=True)
class Whole:
    """Requires all columns on every rank."""


RequiredSplit = Even | Whole | Spans
"""Columns of a Value that its readers require."""

EACH_COLUMN = (
    *(ops.Scale, ops.SoftCap, ops.Clip, ops.Act, ops.GatherRows, ops.PoolRows),
    family_ops.Xielu,
)
"""Ops that compute each column from the same column of one input."""

MIXERS = (ShortConv, SelectiveScan)
"""Replicated ops that mix rows without attention."""

WHOLE_ROWS = (
    *(ops.Embedding, ops.LayerNorm, expert_ops.Route, rank_ops.Dispatch, ops.ScatterRows),
    *(family_ops.Concat, family_ops.SelectColumns),
    *MIXERS,
)
"""Ops that need all columns of all inputs."""


def split_error(what: str, *, hint: str) -> ConfigError:
    return ConfigError(f"tensor_parallel_size: {what}", hint=hint)


def shares(width: int, num_ranks: int, unit: int = 1) -> Spans:
    """Splits `width` columns into contiguous runs of complete units, as evenly as possible; longer
    runs come first.
    """
    units = -(-width // unit)
    assert units >= num_ranks, "the caller asks first"
    borders = [min(-(-rank * units // num_ranks) * unit, width) for rank in range(num_ranks + 1)]
    return tuple(pairwise(borders))


def times(spans: Spans, width: int) -> Spans:
    """Converts spans of heads to spans of columns, `width` per head."""
    return tuple((first * width, last * width) for first, last in spans)


def kv_spans(group: CacheGroup, num_ranks: int) -> Spans:
    """Splits a group's KV heads over ranks; several ranks share a head if there are fewer heads."""
    return split_kv_heads(group.num_kv_heads, num_ranks)


def split_kv_heads(heads: int, num_ranks: int) -> Spans:
    """Splits `heads` KV heads over ranks; several ranks share a head if there are fewer heads."""
    if heads >= num_ranks:
        return shares(heads, num_ranks)
    if num_ranks % heads:
        what = (
            f"got {num_ranks}, but the model has {heads} KV heads; expected a divisor or a multiple"
        )
        raise split_error(what, hint=f"use at most {heads}, or a multiple of it")
    return tuple(
        (rank * heads // num_ranks, rank * heads // num_ranks + 1) for rank in range(num_ranks)
    )


def query_spans(num_heads: int, group: CacheGroup, num_ranks: int) -> Spans:
    """Splits query heads along with their KV heads; ranks that share a KV head split its query
    heads.
    """
    per_kv_head = num_heads // group.num_kv_heads
    copies = max(1, num_ranks // group.num_kv_heads)
    if per_kv_head < copies:
        raise split_error(
            f"got {num_ranks}, but the model has only {num_heads} attention heads",
            hint=f"use at most {num_heads}",
        )
    if copies == 1:
        return times(kv_spans(group, num_ranks), per_kv_head)
    parts = shares(per_kv_head, copies)
    firsts = [first * per_kv_head for first, _ in kv_spans(group, num_ranks)]
    return tuple(
        (first_head + parts[rank % copies][0], first_head + parts[rank % copies][1])
        for rank, first_head in enumerate(firsts)
    )


def head_spans(num_heads: int, num_ranks: int) -> Spans:
    """Splits query heads that all read the same latents."""
    if num_heads < num_ranks:
        raise split_error(
            f"got {num_ranks}, but the model has only {num_heads} attention heads",
            hint=f"use at most {num_heads}",
        )
    return shares(num_heads, num_ranks)


def find_required_splits(program: Program, num_ranks: int) -> dict[Value, RequiredSplit]:
    """Returns each Value's required split.

    Logits may be split; a Value without readers has no entry.
    """
    splits: dict[Value, RequiredSplit] = {
        value: Even() if name == "logits" else Whole() for name, value in program.outputs.items()
    }
    for op in reversed(program.ops):
        for value, wish in _find_input_splits(op, program, num_ranks, splits):
            splits[value] = merge_splits(splits[value], wish) if value in splits else wish
    return splits


def merge_splits(a: RequiredSplit, b: RequiredSplit) -> RequiredSplit:
    """Returns a split that satisfies both."""
    if a == b:
        return a
    if isinstance(a, Even) and isinstance(b, Even):
        return Even(math.lcm(a.unit, b.unit))
    if isinstance(a, Even):
        return b
    return a if isinstance(b, Even) else Whole()


def is_by_heads(norm: ops.RmsNorm) -> bool:
    """Returns whether a norm treats all column groups alike, so that the groups can be split over
    ranks.
    """
    return norm.group_width not in (0, norm.x.width) and norm.weight.shape == (norm.group_width,)


def is_split(wish: RequiredSplit | None) -> bool:
    return wish is not None and not isinstance(wish, Whole)


def _find_input_splits(
    op: Op, program: Program, num_ranks: int, splits: dict[Value, RequiredSplit]
) -> Iterator[tuple[Value, RequiredSplit]]:
    """Yields an op's requirements on its inputs, given the requirements on its outputs
    (`splits`).
    """
    if isinstance(op, ops.Linear | expert_ops.GroupedLinear):
        makes_columns = any(is_split(splits.get(out)) for out in op.outputs)
        yield op.x, Whole() if makes_columns else Even()
        if isinstance(op, expert_ops.GroupedLinear):
            yield op.ids, Whole()
    elif isinstance(op, ops.Attention):
        group = program.group(op.group)
        yield op.q, times(query_spans(op.num_heads, group, num_ranks), group.k_width)
    elif isinstance(op, ops.MlaAttention):
        heads = head_spans(op.num_heads, num_ranks)
        yield op.q_nope, times(heads, op.nope_width)
        yield op.q_rope, times(heads, op.rope_width)
    elif isinstance(op, ops.KvWrite):
        group = program.group(op.group)
        for value in op.inputs:
            heads = kv_spans(group, num_ranks)
            yield (
                value,
                (
                    Whole()
                    if group.num_kv_heads == 1
                    else times(heads, value.width // group.num_kv_heads)
                ),
            )
    else:
        yield from _find_row_input_splits(op, splits)


def _per_column(wish: RequiredSplit, span: int) -> RequiredSplit:
    """Returns the split of a Value with a column per `span` columns of a Value with the split."""
    if isinstance(wish, Whole):
        return wish
    if isinstance(wish, Even):
        return Even(wish.unit // math.gcd(wish.unit, span))
    if any(border % span for one in wish for border in one):
        return Whole()
    return tuple((first // span, last // span) for first, last in wish)


def _find_row_input_splits(
    op: Op, splits: dict[Value, RequiredSplit]
) -> Iterator[tuple[Value, RequiredSplit]]:
    """Yields the requirements of ops that compute a column from the same column or head."""
    if isinstance(op, EACH_COLUMN):
        yield op.x, splits.get(op.out, Whole())
    elif isinstance(op, ops.Add):
        yield from ((value, splits.get(op.out, Whole())) for value in (op.a, op.b))
    elif isinstance(op, ops.ActMul):
        yield from ((value, splits.get(op.out, Whole())) for value in (op.gate, op.up))
    elif isinstance(op, ops.Mul):
        wish, span = splits.get(op.out, Whole()), op.a.width // op.b.width
        if op.b.width == 1 or isinstance(wish, Whole):
            yield op.a, wish
            yield op.b, Whole() if op.b.width == 1 else wish
        else:
            yield op.a, merge_splits(wish, Even(span))
            yield op.b, _per_column(wish, span)
    elif isinstance(op, rank_ops.Collect):
        yield op.x, splits.get(op.out, Whole())
        yield op.ids, Whole()
    elif isinstance(op, expert_ops.Combine):
        yield op.x, splits.get(op.out, Whole())
        yield op.weights_value, Whole()
    elif isinstance(op, ops.Rope):
        yield op.x, merge_splits(splits.get(op.out, Whole()), Even(op.head_width))
    elif isinstance(op, ops.RmsNorm):
        wish = (
            merge_splits(splits.get(op.out, Whole()), Even(op.group_width))
            if is_by_heads(op)
            else Whole()
        )
        yield op.x, wish
    elif isinstance(op, WHOLE_ROWS):
        yield from ((value, Whole()) for value in op.inputs)
    else:
        raise split_error(
            f"the op {op.kind} cannot be split over ranks", hint="set tensor_parallel_size to 1"
        )
