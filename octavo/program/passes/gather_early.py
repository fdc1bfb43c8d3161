"""Gather pass: computes only sampled rows after the last attention.

A model gathers the sampled rows before its head, but the ops between the last attention and that
gather are row-wise. Gathering right after the attention skips the last layer's output projection
and MLP for all other rows: five sixths of a layer with SmolLM2's shape. Saves nothing if all rows
are sampled. llama.cpp does the same (`inp_out_ids`).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.program.family_ops import (
    Concat,
    KeepLargest,
    MatchMagnitude,
    Mix,
    SelectColumns,
    Xielu,
)
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.ops import (
    Act,
    ActMul,
    Add,
    Attention,
    Clip,
    GatherRows,
    LayerNorm,
    Linear,
    MlaAttention,
    Mul,
    RmsNorm,
    Scale,
    SoftCap,
)
from octavo.program.program import Op, Program, Value
from octavo.program.rank_ops import AllGather, AllReduce

ROW_BY_ROW = (
    *(Linear, RmsNorm, LayerNorm, Add, Mul, Scale, SoftCap, Clip, Act, ActMul),
    *(MatchMagnitude, KeepLargest, Mix, Concat, SelectColumns, Xielu),
    *(AllReduce, AllGather),
)
"""Row-wise ops."""


MIXING = (Attention, MlaAttention, ShortConv, SelectiveScan)
"""Ops that read other rows."""


def gather_early(program: Program) -> Program:
    """Moves the Program's GatherRows right behind the last attention, if no other op reads the rows
    in between; otherwise returns the Program unchanged.
    """
    gathers = [op for op in program.ops if isinstance(op, GatherRows)]
    if len(gathers) != 1:
        return program
    early = gathered_before(program, gathers[0], find_gathered_ops(gathers[0], program))
    attended = {out for op in program.ops if isinstance(op, MIXING) for out in op.outputs}
    return (
        early
        if any(isinstance(op, GatherRows) and op.x in attended for op in early.ops)
        else program
    )


def gathered_before(program: Program, gather: GatherRows, tail_ops: list[Op]) -> Program:
    """Returns the Program with `tail_ops` on sampled rows only: gathers their inputs instead of
    their outputs.
    """
    tail_values = {value for op in tail_ops for value in op.outputs}
    read = dict.fromkeys(
        value for op in (*tail_ops, gather) for value in op.inputs if value not in tail_values
    )
    sampled = {
        value: replace(value, name=f"{value.name}.sampled", axis="samples")
        for value in (*read, *tail_values)
    }
    sampled[gather.x] = gather.out
    gather_index, moved = program.ops.index(gather), set(map(id, tail_ops))
    before = [op for op in program.ops[:gather_index] if id(op) not in moved]
    gathers = [GatherRows(value, sampled[value]) for value in read]
    on_samples = [op.on(sampled) for op in tail_ops]
    early = replace(program, ops=(*before, *gathers, *on_samples, *program.ops[gather_index + 1 :]))
    early.check()
    return early


def find_gathered_ops(gather: GatherRows, program: Program) -> list[Op]:
    """Returns the row-wise ops before the gather whose Values are read only by the gather or by
    other such ops.
    """
    readers: dict[Value, list[Op]] = {}
    for op in program.ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    outputs = set(program.outputs.values())
    chosen: list[Op] = []
    for op in reversed(program.ops[: program.ops.index(gather)]):
        reading = [reader for value in op.outputs for reader in readers.get(value, [])]
        only_here = reading and all(
            reader is gather or any(reader is other for other in chosen) for reader in reading
        )
        if isinstance(op, ROW_BY_ROW) and only_here and outputs.isdisjoint(op.outputs):
            chosen.append(op)
    return chosen[::-1]
