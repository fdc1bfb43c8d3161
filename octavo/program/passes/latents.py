"""Absorb_latents pass: MlaAttention becomes per-head matmuls around an attention whose keys contain
its values.

For backends without an MLA kernel. Queries are projected to latent space, followed by their rotary
part; all heads attend to the latents as a single kv head; outputs are projected to values.
DeepSeek-V2, section 2.1.2.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.program.ops import Attention, HeadLinear, MlaAttention
from octavo.program.program import Op, Program, Value, Weight


def absorb_latents(program: Program) -> Program:
    """Rewrites each absorbed MlaAttention that is not split over ranks."""
    ops: list[Op] = []
    for op in program.ops:
        if isinstance(op, MlaAttention) and op.form == "absorbed" and op.kv_b.cut is None:
            ops += _absorb(op)
        else:
            ops.append(op)
    result = replace(program, ops=tuple(ops))
    result.check()
    return result


def _absorb(op: MlaAttention) -> tuple[Op, ...]:
    heads, key_width = op.num_heads, op.latent_width + op.rope_width
    q = Value(f"{op.out.name}.queries", op.out.axis, heads * key_width)
    latents = Value(f"{op.out.name}.latents", op.out.axis, heads * op.latent_width)
    to_keys = _rows(op, 0, op.nope_width)
    to_values = _rows(op, op.nope_width, op.v_width)
    return (
        HeadLinear(op.q_nope, q, to_keys, heads, transposed=True, tail=op.q_rope),
        Attention(
            q=q,
            out=latents,
            group=op.group,
            layer=op.layer,
            num_heads=heads,
            scale=op.scale,
            latent_width=op.latent_width,
        ),
        HeadLinear(latents, op.out, to_values, heads),
    )


def _rows(op: MlaAttention, start: int, width: int) -> Weight:
    """Returns `width` rows of each head's part of kv_b."""
    return replace(
        op.kv_b,
        shape=(op.num_heads * width, op.latent_width),
        source_rows=op.kv_b.shape[0],
        row_start=start,
        row_step=op.nope_width + op.v_width,
        row_run=width,
    )
