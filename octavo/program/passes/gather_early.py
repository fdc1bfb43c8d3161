"""The gather pass: rows that are not sampled end at the last attention.

A model gathers the sampled rows before its head, yet all ops between the last attention and that
gather work row by row. Gathered right behind the attention instead, a prompt's other rows are
spared the last layer's output projection and its gate, up and down projections: five sixths of a
layer of SmolLM2's shape. Where all rows are sampled, nothing is spared. llama.cpp's graphs do the
same (`inp_out_ids`).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.program.family_ops import KeepLargest, MatchMagnitude, Mix
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
    *(MatchMagnitude, KeepLargest, Mix),
    *(AllReduce, AllGather),
)
"""Ops whose row r is made of row r of their inputs alone, whatever rows there are."""


MIXING = (Attention, MlaAttention, ShortConv, SelectiveScan)
"""Ops that read other rows than their own."""


def gather_early(program: Program) -> Program:
    """Moves the Program's one GatherRows behind the last attention, where nothing but that gather
    reads the rows in between; returns the Program as it is elsewhere.
    """
    gathers = [op for op in program.ops if isinstance(op, GatherRows)]
    if len(gathers) != 1:
        return program
    early = gathered_before(program, gathers[0], wanted_by(gathers[0], program))
    attended = {out for op in program.ops if isinstance(op, MIXING) for out in op.outputs}
    return (
        early
        if any(isinstance(op, GatherRows) and op.x in attended for op in early.ops)
        else program
    )


def gathered_before(program: Program, gather: GatherRows, late: list[Op]) -> Program:
    """Returns the Program with the `late` ops on sampled rows: their inputs are gathered, instead
    of their outputs.
    """
    made = {value for op in late for value in op.outputs}
    read = dict.fromkeys(
        value for op in (*late, gather) for value in op.inputs if value not in made
    )
    sampled = {
        value: replace(value, name=f"{value.name}.sampled", axis="samples")
        for value in (*read, *made)
    }
    sampled[gather.x] = gather.out
    at, moved = program.ops.index(gather), set(map(id, late))
    before = [op for op in program.ops[:at] if id(op) not in moved]
    gathers = [GatherRows(value, sampled[value]) for value in read]
    on_samples = [op.on(sampled) for op in late]
    early = replace(program, ops=(*before, *gathers, *on_samples, *program.ops[at + 1 :]))
    early.check()
    return early


def wanted_by(gather: GatherRows, program: Program) -> list[Op]:
    """Returns the ops before the gather, in order, that work row by row and whose Values only this
    gather and one another read.
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
