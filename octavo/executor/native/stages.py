"""Divides a Program into stages of the native executor, and stages into ranges that a block of rows
passes through without a barrier.

The arena plan and the footprint depend on both. PlanBuilder (csrc/plan/builder.h) computes the
same: consecutive row-local stages form a range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.executor.native.formats import RecordOp
from octavo.executor.native.hidden import HiddenIn, HiddenOut
from octavo.program import expert_ops, family_ops, ops, rank_ops
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.passes.arena import ArenaPlan, assign_offsets
from octavo.program.program import Op, Program

ROW_LOCAL = (
    *(ops.Embedding, ops.RmsNorm, ops.LayerNorm, ops.Rope, ops.KvWrite, ops.GatherRows),
    *(ops.PoolRows, ops.ScatterRows, expert_ops.Combine),
    *(family_ops.MatchMagnitude, family_ops.KeepLargest, family_ops.Mix),
    *(family_ops.Concat, family_ops.SelectColumns, family_ops.Xielu),
    *(ops.Add, ops.Mul, ops.Scale, ops.SoftCap, ops.Clip, ops.Act, ops.ActMul),
    *(HiddenIn, HiddenOut),
)

BEHIND_BARRIERS = (
    *(ops.Attention, expert_ops.Route, expert_ops.GroupedLinear, ShortConv, SelectiveScan),
    *(rank_ops.AllReduce, rank_ops.AllGather, rank_ops.Dispatch, rank_ops.Collect),
    *(RecordOp, ops.PrefetchNeurons),
)
"""Ops that form a separate range, because a row needs results of other rows or ranks."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Ops between two barriers: consecutive row-local ones, or a single other op."""

    ops: tuple[Op, ...]
    axis: str
    """Rows that its ops process: tokens, samples or requests."""
    range: int
    """Index of its range: consecutive stages without attention or experts, which a row block passes
    through without a barrier."""

    @property
    def is_row_local(self) -> bool:
        return isinstance(self.ops[0], ROW_LOCAL)


def sort_token_ops_first(program: Program) -> Program:
    """Sorts the ops on tokens before those on samples or requests, as the executor runs them.

    No op leads back to tokens.
    """
    return replace(program, ops=tuple(sorted(program.ops, key=lambda op: _axis(op) != "tokens")))


def get_stages(program: Program) -> tuple[Stage, ...]:
    """Returns the stages of a Program sorted by `sort_token_ops_first`."""
    stages: list[Stage] = []
    for op in program.ops:
        before = stages[-1] if stages else None
        if before is None:
            stages.append(Stage((op,), _axis(op), 0))
        elif _shares_stage(before.ops[-1], op):
            stages[-1] = replace(before, ops=(*before.ops, op))
        else:
            next_range = before.range + _starts_range(before.ops[-1], op)
            stages.append(Stage((op,), _axis(op), next_range))
    return tuple(stages)


def plan_arena(program: Program, stages: tuple[Stage, ...]) -> ArenaPlan:
    """Returns the arena offset of each Value."""
    numbered = [(index, stage.range) for index, stage in enumerate(stages) for _ in stage.ops]
    indices, ranges = [index for index, _ in numbered], [number for _, number in numbered]
    return assign_offsets(program, indices, ranges)


def _shares_stage(before: Op, op: Op) -> bool:
    both = isinstance(before, ROW_LOCAL) and isinstance(op, ROW_LOCAL)
    return both and _axis(before) == _axis(op)


def _starts_range(before: Op, op: Op) -> bool:
    waits = isinstance(before, BEHIND_BARRIERS) or isinstance(op, BEHIND_BARRIERS)
    return waits or _axis(before) != _axis(op)


def _axis(op: Op) -> str:
    """Returns the axis of an op's rows; expert rows count as tokens."""
    axis = op.outputs[0].axis if op.outputs else op.inputs[0].axis
    return "tokens" if axis == "expert_rows" else axis
