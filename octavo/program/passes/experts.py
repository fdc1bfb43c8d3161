"""The experts pass: each of several ranks gets whole experts (expert parallelism).

Everything else stands on every rank, and so do the rows: a rank computes those that its experts
were chosen for, and Collect brings the others' rows back before Combine, whose order is that of one
process. Where engines with rows of their own share their experts, Dispatch brings each rank the
rows of all of them. No number changes. Runs behind stages and before shard, which splits the
experts of each rank once more. Source: Lepikhin et al. 2020 (GShard), section 3.2.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import ConfigError
from octavo.program import expert_ops, rank_ops
from octavo.program.passes.splits import Spans, shares
from octavo.program.program import Op, Program, Span, Value

HINTS = {
    "expert_parallel_size": "leave expert_parallel_size at 1",
    "enable_expert_parallel": "leave enable_expert_parallel out",
}
"""Hint for each option that shares out experts."""


def share_experts(program: Program, rank: int, num_ranks: int, num_engines: int = 1) -> Program:
    """Returns the part that rank `rank` of `num_ranks` computes; the Program itself where it, as a
    stage may, has no experts. `num_engines` of the ranks' groups, neighbours, have rows of their
    own.
    """
    if num_ranks == 1 or not _routes(program):
        return program
    shared = replace(program, ops=_ops_of(program, rank, num_ranks, num_engines))
    shared.check()
    return shared


def check_experts(program: Program, num_ranks: int, option: str = "expert_parallel_size") -> None:
    """Raises ConfigError, which names the `option`, where a whole Program has no experts to share
    out, or fewer than ranks.
    """
    if num_ranks == 1:
        return
    routes = _routes(program)
    if not routes:
        raise _refused(option, f"got {num_ranks}, but {program.name} has no experts", HINTS[option])
    fewest = min(op.num_experts for op in routes)
    if fewest < num_ranks:
        raise _refused(
            option,
            f"got {num_ranks}, but {program.name} has {fewest} experts",
            f"take at most {fewest}",
        )


def _routes(program: Program) -> list[expert_ops.Route]:
    return [op for op in program.ops if isinstance(op, expert_ops.Route)]


def _ops_of(program: Program, rank: int, num_ranks: int, num_engines: int) -> tuple[Op, ...]:
    made: list[Op] = []
    chosen: dict[Value, tuple[Value, Spans]] = {}
    """Ids of a choice and the experts of each rank, by the ids and the weights of the choice."""
    dispatched: dict[Value, Value] = {}
    """Rows of all engines' tokens, by those of this engine's own."""
    for op in program.ops:
        if isinstance(op, expert_ops.Route):
            rows, ids, weights = op.outs
            spans = shares(op.num_experts, num_ranks)
            chosen[ids] = chosen[weights] = (ids, spans)
            dispatch = rank_ops.Dispatch(ids, _own(ids), *spans[rank])
            if num_engines > 1:
                dispatched[rows] = replace(rows, name=f"{rows.name}.dispatched")
                outs = (dispatched[rows],)
                dispatch = replace(dispatch, rows=rows, outs=outs, num_engines=num_engines)
            made += [op, dispatch]
        elif isinstance(op, expert_ops.GroupedLinear):
            _, spans = chosen[op.ids]
            made.append(replace(_product(op, spans[rank]), x=dispatched.get(op.x, op.x)))
        elif isinstance(op, expert_ops.Combine):
            ids, spans = chosen[op.weights_value]
            all_rows = replace(op.x, name=f"{op.x.name}.collected")
            sizes = tuple(last - first for first, last in spans)
            collect = rank_ops.Collect(op.x, ids, all_rows, sizes, num_engines)
            made += [collect, replace(op, x=all_rows)]
        else:
            made.append(op)
    return tuple(made)


def _own(ids: Value) -> Value:
    """Returns the Value of a choice's ids among this rank's experts."""
    return replace(ids, name=f"{ids.name}.own")


def _product(op: expert_ops.GroupedLinear, span: Span) -> expert_ops.GroupedLinear:
    assert op.gate is None, "experts are shared out before gates are folded"
    bias = None if op.bias is None else op.bias.part(experts=span)
    return replace(op, ids=_own(op.ids), weight=op.weight.part(experts=span), bias=bias)


def _refused(option: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{option}: {what}", hint=hint)
