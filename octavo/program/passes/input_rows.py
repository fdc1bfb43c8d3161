"""Input-rows pass: a decoder reads given rows in place of the embeddings of placeholder tokens."""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import UnsupportedModel
from octavo.program.ops import Embedding, ScatterRows, num_position_axes
from octavo.program.program import Op, Program


def find_embedding(program: Program) -> Embedding:
    """Returns the lookup of the token embeddings.

    Raises UnsupportedModel for Programs that cannot continue given rows: those with an encoder,
    several lookups per token (Gemma 3n) or several position axes (Qwen2-VL), and those that pool.
    """
    lookups = [op for op in program.ops if isinstance(op, Embedding) and op.ids is not None]
    if (
        len(lookups) != 1
        or program.input_groups
        or "pooled" in program.outputs
        or num_position_axes(program) > 1
    ):
        raise UnsupportedModel(
            "enable_prompt_embeds: not supported by this model, expected a decoder with one"
            " embedding per token and one position axis",
            hint="remove enable_prompt_embeds",
        )
    return lookups[0]


def accept_input_rows(program: Program) -> Program:
    """Returns the Program that replaces token embeddings by the step's external rows."""
    lookup = find_embedding(program)
    if any(isinstance(op, ScatterRows) for op in program.ops):
        return program
    given = replace(lookup.out, name=f"{lookup.out.name}.given")
    ops: list[Op] = []
    for op in program.ops:
        if op is lookup:
            ops += [op, ScatterRows(given, op.out)]
        else:
            ops.append(op.on({lookup.out: given}))
    extended = replace(program, ops=tuple(ops))
    extended.check()
    return extended
