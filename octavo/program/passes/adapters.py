"""Adapters pass: records the module name of each matrix, so that adapters can be matched to
matrices.

Sets `Linear.sites` and `Embedding.site` without adding ops, so fusion is unchanged; the fuse pass
merges sites along with matrices. Runs before fuse and after shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from octavo.program.low_rank import Site
from octavo.program.ops import Embedding, Linear
from octavo.program.program import Op, Program, Weight

TIED_HEAD = "lm_head"
"""Module of an output layer tied to the embedding table."""


def with_sites(program: Program, whole: Program | None = None) -> Program:
    """Returns the Program with adapter sites; `whole` is the complete Program if this is one rank's
    part.
    """
    tables = {op.table.name for op in (whole or program).ops if isinstance(op, Embedding)}

    def placed(op: Op) -> Op:
        if isinstance(op, Linear):
            return replace(op, sites=tuple(_module(weight, tables) for weight in op.weights_))
        if isinstance(op, Embedding) and op.ids is not None:
            return replace(op, site=op.table.name.removesuffix(".weight"))
        return op

    result = replace(program, ops=tuple(map(placed, program.ops)))
    result.check()
    return result


def iter_sites(program: Program) -> Iterator[Site]:
    for op in program.ops:
        if isinstance(op, Linear):
            yield from zip(op.sites, op.weights_, strict=bool(op.sites))
        elif isinstance(op, Embedding) and op.site:
            yield op.site, op.table


def find_table_sites(program: Program) -> set[Site]:
    """Returns the sites that are embedding tables."""
    return {(op.site, op.table) for op in program.ops if isinstance(op, Embedding) and op.site}


def _module(weight: Weight, tables: set[str]) -> str:
    """Returns the module name of a matrix, also if it is one rank's part."""
    return TIED_HEAD if weight.name in tables else weight.name.removesuffix(".weight")
