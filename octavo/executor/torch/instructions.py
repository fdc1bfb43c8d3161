"""Compiles a Program's ops into instructions: each op with its formula and the Values freed after
it, split into a body over all rows and a head over sampled rows.

`FORMULAS` lists the supported ops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.executor.torch.attention.formulas import ATTENTION_FORMULAS
from octavo.executor.torch.experts import EXPERT_FORMULAS
from octavo.executor.torch.mixers import MIXER_FORMULAS
from octavo.executor.torch.rope_write import with_rope_writes
from octavo.executor.torch.row_ops import ROW_FORMULAS
from octavo.executor.torch.step import Made, Step
from octavo.program import rank_ops
from octavo.program.program import Op, Program, Value


def all_reduce(op: rank_ops.AllReduce, step: Step) -> Made:
    assert step.ranks is not None
    return (step.ranks.all_reduce(step.get(op.x)),)


def all_gather(op: rank_ops.AllGather, step: Step) -> Made:
    assert step.ranks is not None
    return (step.ranks.all_gather(step.get(op.x), op.widths),)


def collect(op: rank_ops.Collect, step: Step) -> Made:
    assert step.ranks is not None
    ids = step.get(op.ids).reshape(-1)
    firsts = torch.tensor(op.firsts, dtype=ids.dtype, device=ids.device)
    owners = torch.searchsorted(firsts, ids, right=True) - 1
    return (step.ranks.collect(step.get(op.x), owners),)


RANK_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    rank_ops.AllReduce: all_reduce,
    rank_ops.AllGather: all_gather,
    rank_ops.Collect: collect,
}


FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = (
    ROW_FORMULAS | MIXER_FORMULAS | EXPERT_FORMULAS | ATTENTION_FORMULAS | RANK_FORMULAS
)


@dataclass(frozen=True, slots=True)
class Instruction:
    op: Op
    formula: Callable[[Any, Step], Made]
    dead: tuple[str, ...]
    """Values that no later op reads."""

    def run(self, step: Step) -> None:
        outputs = self.formula(self.op, step)
        for value, tensor in zip(self.op.outputs, outputs, strict=True):
            step.values[value.name] = tensor
        for name in self.dead:
            del step.values[name]


@dataclass(frozen=True, slots=True)
class Instructions:
    """Instructions of the body, and of the head, which computes gathered rows."""

    body: list[Instruction]
    head: list[Instruction]

    @staticmethod
    def of(program: Program, *, write_with_rope: bool) -> Instructions:
        """Splits a Program's ops into body and head. `write_with_rope` merges ropes and KV writes
        into `RopeWrite`.
        """
        head = _get_head_ops(program)
        in_head = set(map(id, head))
        body = [op for op in program.ops if id(op) not in in_head]
        kept_names = {value.name for op in head for value in op.inputs}
        kept_names |= {value.name for value in program.outputs.values()}
        if write_with_rope:
            body = with_rope_writes(body, kept_names)
        return Instructions(
            _freeing(body, kept_names), [Instruction(op, FORMULAS[type(op)], ()) for op in head]
        )


def _get_head_ops(program: Program) -> list[Op]:
    """Returns the ops that compute Values over sampled rows, or read these."""
    sampled: set[Value] = set()
    head: list[Op] = []
    for op in program.ops:
        gathers = any(value.axis == "samples" for value in op.outputs)
        if gathers or any(value in sampled for value in op.inputs):
            head.append(op)
            sampled.update(op.outputs)
    return head


def _freeing(body: Sequence[Op], kept_names: Collection[str]) -> list[Instruction]:
    """Returns the body's instructions, each freeing the Values used last by it."""
    last = {value.name: index for index, op in enumerate(body) for value in op.inputs}
    instructions = []
    for index, op in enumerate(body):
        names = {v.name for v in (*op.inputs, *op.outputs) if last.get(v.name, index) == index}
        instructions.append(
            Instruction(op, FORMULAS[type(op)], tuple(names.difference(kept_names)))
        )
    return instructions
