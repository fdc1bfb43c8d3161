"""The columns of a Program's Values that each rank has, as their readers want them.

Readers are asked last to first: attention wants whole heads, a product of rows takes any columns on
the borders of its weight's groups and then makes a part of a sum, a norm of whole rows wants all.
Knows ops and widths; `shard.py` rewrites them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from octavo.api.errors import ConfigError
from octavo.program import expert_ops, ops, rank_ops
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.program import CacheGroup, Op, Program, Span, Value, Weight

Spans = tuple[Span, ...]
"""Columns of each rank, in rank order; those of KV heads that are fewer than the ranks overlap."""

UnitOf = Callable[[Weight], int]
"""Tells how many neighbouring inputs of a weight can only be cut together: 1, or the group of its
scales."""


@dataclass(frozen=True, slots=True)
class Even:
    """Wish for any columns with borders at multiples of `unit`."""

    unit: int = 1


@dataclass(frozen=True, slots=True)
class Whole:
    """Wish for all columns on every rank."""


Wish = Even | Whole | Spans
"""Columns of a Value that its readers want."""

EACH_COLUMN = (ops.Scale, ops.SoftCap, ops.Clip, ops.Act, ops.GatherRows, ops.PoolRows)
"""Ops of one input, each column of which is made of the same column."""

MIXERS = (ShortConv, SelectiveScan)
"""Ops that mix rows without attention, which every rank computes whole."""

WHOLE_ROWS = (
    *(ops.Embedding, ops.LayerNorm, expert_ops.Route, rank_ops.Dispatch, ops.ScatterRows),
    *MIXERS,
)
"""Ops that need all columns of all their inputs."""


def refused(what: str, *, hint: str) -> ConfigError:
    return ConfigError(f"tensor_parallel_size: {what}", hint=hint)


def shares(width: int, num_ranks: int, unit: int = 1) -> Spans:
    """Cuts the columns 0 to `width` into neighbouring runs of whole units, as even as can be, the
    first ranks' the longest; every rank has some.
    """
    units = -(-width // unit)
    assert units >= num_ranks, "the caller asks first"
    borders = [min(-(-rank * units // num_ranks) * unit, width) for rank in range(num_ranks + 1)]
    return tuple(pairwise(borders))


def times(spans: Spans, width: int) -> Spans:
    """Turns spans of heads into spans of columns, `width` for each head."""
    return tuple((first * width, last * width) for first, last in spans)


def kv_spans(group: CacheGroup, num_ranks: int) -> Spans:
    """Shares out a group's KV heads: some for each rank, or each head for several ranks."""
    return spans_of_kv_heads(group.num_kv_heads, num_ranks)


def spans_of_kv_heads(heads: int, num_ranks: int) -> Spans:
    """Shares out a number of KV heads: some for each rank, or each head for several ranks."""
    if heads >= num_ranks:
        return shares(heads, num_ranks)
    if num_ranks % heads:
        what = (
            f"got {num_ranks}, but the model has {heads} KV heads: they can neither be shared out"
            " nor each be given to as many ranks"
        )
        raise refused(what, hint=f"take a number up to {heads}, or a multiple of it")
    return tuple(
        (rank * heads // num_ranks, rank * heads // num_ranks + 1) for rank in range(num_ranks)
    )


def query_spans(num_heads: int, group: CacheGroup, num_ranks: int) -> Spans:
    """Shares out query heads by the KV heads they read; ranks that share a KV head have a part of
    its query heads each.
    """
    per_kv_head = num_heads // group.num_kv_heads
    copies = max(1, num_ranks // group.num_kv_heads)
    if per_kv_head < copies:
        raise refused(
            f"got {num_ranks}, but the model has only {num_heads} attention heads",
            hint=f"take at most {num_heads}",
        )
    if copies == 1:
        return times(kv_spans(group, num_ranks), per_kv_head)
    parts = shares(per_kv_head, copies)
    firsts = [first * per_kv_head for first, _ in kv_spans(group, num_ranks)]
    return tuple(
        (at + parts[rank % copies][0], at + parts[rank % copies][1])
        for rank, at in enumerate(firsts)
    )


def head_spans(num_heads: int, num_ranks: int) -> Spans:
    """Shares out heads that all read the same latents."""
    if num_heads < num_ranks:
        raise refused(
            f"got {num_ranks}, but the model has only {num_heads} attention heads",
            hint=f"take at most {num_heads}",
        )
    return shares(num_heads, num_ranks)


def wishes(program: Program, num_ranks: int, unit_of: UnitOf) -> dict[Value, Wish]:
    """Finds how each Value is wanted. The logits may come in parts; a Value without readers has no
    entry.
    """
    found: dict[Value, Wish] = {
        value: Even() if name == "logits" else Whole() for name, value in program.outputs.items()
    }
    for op in reversed(program.ops):
        for value, wish in _asked(op, program, num_ranks, found, unit_of):
            found[value] = met(found[value], wish) if value in found else wish
    return found


def met(a: Wish, b: Wish) -> Wish:
    """Returns the wish that serves both."""
    if a == b:
        return a
    if isinstance(a, Even) and isinstance(b, Even):
        return Even(math.lcm(a.unit, b.unit))
    if isinstance(a, Even):
        return b
    return a if isinstance(b, Even) else Whole()


def is_by_heads(norm: ops.RmsNorm) -> bool:
    """Tells whether a norm treats all groups of columns alike, so that any of them may be apart."""
    return norm.group_width not in (0, norm.x.width) and norm.weight.shape == (norm.group_width,)


def is_split(wish: Wish | None) -> bool:
    return wish is not None and not isinstance(wish, Whole)


def _asked(
    op: Op, program: Program, num_ranks: int, found: dict[Value, Wish], unit_of: UnitOf
) -> Iterator[tuple[Value, Wish]]:
    """Yields an op's wishes for its inputs, given the wishes for its outputs."""
    if isinstance(op, ops.Linear | expert_ops.GroupedLinear):
        makes_columns = any(is_split(found.get(out)) for out in op.outputs)
        units = [unit_of(weight) for weight in matrices_of(op)]
        yield op.x, Whole() if makes_columns else Even(math.lcm(*units))
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
        yield from _asked_by_rows(op, found)


def _asked_by_rows(op: Op, found: dict[Value, Wish]) -> Iterator[tuple[Value, Wish]]:
    """Yields the wishes of ops that make a column of the same column, or of its head."""
    if isinstance(op, EACH_COLUMN):
        yield op.x, found.get(op.out, Whole())
    elif isinstance(op, ops.Add):
        yield from ((value, found.get(op.out, Whole())) for value in (op.a, op.b))
    elif isinstance(op, ops.ActMul):
        yield from ((value, found.get(op.out, Whole())) for value in (op.gate, op.up))
    elif isinstance(op, ops.Mul):
        yield op.a, found.get(op.out, Whole())
        yield op.b, found.get(op.out, Whole()) if op.b.width == op.a.width else Whole()
    elif isinstance(op, rank_ops.Collect):
        yield op.x, found.get(op.out, Whole())
        yield op.ids, Whole()
    elif isinstance(op, expert_ops.Combine):
        yield op.x, found.get(op.out, Whole())
        yield op.weights_value, Whole()
    elif isinstance(op, ops.Rope):
        yield op.x, met(found.get(op.out, Whole()), Even(op.head_width))
    elif isinstance(op, ops.RmsNorm):
        wish = met(found.get(op.out, Whole()), Even(op.group_width)) if is_by_heads(op) else Whole()
        yield op.x, wish
    elif isinstance(op, WHOLE_ROWS):
        yield from ((value, Whole()) for value in op.inputs)
    else:
        raise refused(
            f"the op {op.kind} cannot be split over ranks", hint="leave tensor_parallel_size at 1"
        )


def matrices_of(op: ops.Linear | expert_ops.GroupedLinear) -> tuple[Weight, ...]:
    return op.weights_ if isinstance(op, ops.Linear) else (op.weight,)
