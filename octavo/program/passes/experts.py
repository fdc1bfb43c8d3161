"""Experts pass (expert parallelism): distributes complete experts over ranks.

All other ops are replicated. A rank computes the rows routed to its experts; Collect then gathers
the other ranks' rows, so that Combine sums in the same order as a single process. With several
engines, Dispatch sends every rank the rows of all engines. Results do not change. Runs after stages
and before shard. Source: Lepikhin et al. 2020 (GShard), section 3.2.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import ConfigError
from octavo.program import expert_ops, rank_ops
from octavo.program.passes.splits import Spans, shares
from octavo.program.program import Op, Program, Span, Value

HINTS = {
    "expert_parallel_size": "set expert_parallel_size to 1",
    "enable_expert_parallel": "remove enable_expert_parallel",
}


def share_experts(program: Program, rank: int, num_ranks: int, num_engines: int = 1) -> Program:
    """Returns the part that rank `rank` of `num_ranks` computes; the Program itself if it has no
    experts.

    The ranks may belong to several engines (`num_engines`, each a group of neighbouring ranks),
    which process different tokens.
    """
    if num_ranks == 1 or not _routes(program):
        return program
    shared = replace(program, ops=_build_ops(program, rank, num_ranks, num_engines))
    shared.check()
    return shared


def check_experts(program: Program, num_ranks: int, option: str = "expert_parallel_size") -> None:
    """Raises ConfigError naming `option` if a Program has no experts, or fewer than ranks."""
    if num_ranks == 1:
        return
    routes = _routes(program)
    if not routes:
        raise _config_error(
            option, f"got {num_ranks}, but {program.name} has no experts", HINTS[option]
        )
    fewest = min(op.num_experts for op in routes)
    if fewest < num_ranks:
        raise _config_error(
            option,
            f"got {num_ranks}, but {program.name} has {fewest} experts",
            f"use at most {fewest}",
        )


def _routes(program: Program) -> list[expert_ops.Route]:
    return [op for op in program.ops if isinstance(op, expert_ops.Route)]


def _build_ops(program: Program, rank: int, num_ranks: int, num_engines: int) -> tuple[Op, ...]:
    ops: list[Op] = []
    chosen: dict[Value, tuple[Value, Spans]] = {}
    """Local ids and the experts of each rank, by a route's ids and weights."""
    dispatched: dict[Value, Value] = {}
    """Maps this engine's rows to the rows of all engines' tokens."""
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
            ops += [op, dispatch]
        elif isinstance(op, expert_ops.GroupedLinear):
            _, spans = chosen[op.ids]
            ops.append(replace(_product(op, spans[rank]), x=dispatched.get(op.x, op.x)))
        elif isinstance(op, expert_ops.Combine):
            ids, spans = chosen[op.weights_value]
            all_rows = replace(op.x, name=f"{op.x.name}.collected")
            sizes = tuple(last - first for first, last in spans)
            collect = rank_ops.Collect(op.x, ids, all_rows, sizes, num_engines)
            ops += [collect, replace(op, x=all_rows)]
        else:
            ops.append(op)
    return tuple(ops)


def _own(ids: Value) -> Value:
    """Returns the Value of ids relative to this rank's experts."""
    return replace(ids, name=f"{ids.name}.own")


def _product(op: expert_ops.GroupedLinear, span: Span) -> expert_ops.GroupedLinear:
    assert op.gate is None, "experts are shared out before gates are folded"
    bias = None if op.bias is None else op.bias.part(experts=span)
    return replace(op, ids=_own(op.ids), weight=op.weight.part(experts=span), bias=bias)


def _config_error(option: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{option}: {what}", hint=hint)
