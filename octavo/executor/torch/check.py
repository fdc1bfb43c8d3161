"""Rejects Programs that the torch backend cannot run, before any weight is read."""

from __future__ import annotations

from octavo.api.errors import BackendUnavailable
from octavo.executor.rank_grid import RankGrid, misplaced
from octavo.executor.torch.instructions import FORMULAS
from octavo.program import ops
from octavo.program.program import Op, Program

MASKS = ("causal", "window", "chunk", "full")


def check_program(program: Program, *, grid: RankGrid, batch_invariant: bool) -> None:
    """Raises BackendUnavailable naming the unsupported op or cache group."""
    for op in program.ops:
        if refused := _refusal(op, grid) or _invariance_refusal(op, program, batch_invariant):
            raise _unavailable(program, refused)


def _refusal(op: Op, grid: RankGrid) -> str | None:
    if type(op) not in FORMULAS:
        return f"the op {op.kind}"
    if refused := misplaced(op, grid):
        return refused
    if isinstance(op, ops.Attention) and op.mask not in MASKS:
        return f"attention with the mask {op.mask}"
    return None


def _invariance_refusal(op: Op, program: Program, batch_invariant: bool) -> str | None:
    """Rejects attention to later tokens with batch_invariant, which may run each row as its own
    step.
    """
    ahead = isinstance(op, ops.Attention) and (op.mask == "full" or op.sees_ahead)
    if not batch_invariant or not isinstance(op, ops.Attention) or not ahead:
        return None
    written = {write.group for write in program.ops if isinstance(write, ops.KvWrite)}
    return "attention to later tokens with batch_invariant" if op.group in written else None


def _unavailable(program: Program, what: str) -> BackendUnavailable:
    return BackendUnavailable(f"the torch backend cannot run {what} (in {program.name})")
