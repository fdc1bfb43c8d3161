"""The attention ops of a Program: each builds an `AttentionCall` or a `RopeWriteCall` for the
chosen kernels.

`ATTENTION_FORMULAS` is the dispatch table. Formulas and sources: `ops.Attention`,
`ops.MlaAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.executor.torch.attention.bias import make_bias
from octavo.executor.torch.attention.call import AttentionCall, ExpandKv
from octavo.executor.torch.attention.disentangled import disentangled_attention
from octavo.executor.torch.attention.query_rows import make_query_rows
from octavo.executor.torch.rope_write import RopeWrite, RopeWriteCall
from octavo.executor.torch.row_ops import angles
from octavo.executor.torch.step import Made, Step
from octavo.program import ops
from octavo.program.program import Op


def attention(op: ops.Attention, step: Step) -> Made:
    if isinstance(op.bias, ops.PositionBuckets):
        return (disentangled_attention(op, op.bias, step),)
    at = step.program.group_index(op.group)
    group, cache = step.program.groups[at], step.kv[at]
    q = step.get(op.q)
    window = op.window if op.mask in ("window", "chunk") else None
    call = AttentionCall(
        op=op,
        q=q.view(len(q), op.num_heads, group.k_width),
        k=cache.k.layer(op.layer),
        v=cache.v.layer(op.layer),
        **_paging(step, at, full=op.mask == "full", window=window, chunks=op.mask == "chunk"),
        scale=op.scale,
        v_width=group.v_width,
        softcap=op.softcap,
        sinks=None if op.sinks is None else step.weights.vector(op.sinks),
        bias=make_bias(op, step),
    )
    return (step.attention.attend(call).reshape(len(q), op.out.width),)


def mla_attention(op: ops.MlaAttention, step: Step) -> Made:
    """Computes latent attention.

    Absorbed: queries are projected to latent space and share one head of latents. Expanded: each
    head has its own keys and values.
    """
    at = step.program.group_index(op.group)
    cache = step.kv[at]
    heads = (
        step.weights.matrix(op.kv_b)
        .floats(step.dtype)
        .view(op.num_heads, op.nope_width + op.v_width, op.latent_width)
    )
    up_k, up_v = heads[:, : op.nope_width], heads[:, op.nope_width :]
    q_nope, q_rope = step.get(op.q_nope), step.get(op.q_rope)
    q_nope = q_nope.view(len(q_nope), op.num_heads, op.nope_width)
    q_rope = q_rope.view(len(q_rope), op.num_heads, op.rope_width)
    absorbed = op.form == "absorbed"
    if absorbed:
        q_nope = torch.einsum("thn,hnl->thl", q_nope, up_k)
    call = AttentionCall(
        op=op,
        q=torch.cat([q_nope, q_rope], dim=-1),
        k=cache.k.layer(op.layer),
        v=(cache.k if absorbed else cache.v).layer(op.layer),
        **_paging(step, at, full=False, window=None),
        scale=op.scale,
        v_width=op.latent_width if absorbed else op.v_width,
        expand=_latents(op) if absorbed else _expanded(op, up_k, up_v),
    )
    out = step.attention.attend(call)
    if absorbed:
        out = torch.einsum("thl,hvl->thv", out, up_v)
    return (out.reshape(len(out), op.out.width),)


def rope_write(op: RopeWrite, step: Step) -> Made:
    at = step.program.group_index(op.group)
    group, cache = step.program.groups[at], step.kv[at]
    cos, sin = step.once(op.table, lambda: angles(op.table, step))
    q, k, v = (step.get(value) for value in (op.q, op.k, op.v))
    assert step.attention.rope_write is not None
    call = RopeWriteCall(
        op=op,
        q=q.view(len(q), op.num_heads, op.head_width),
        k=k.view(len(k), group.num_kv_heads, op.head_width),
        v=v.view(len(v), group.num_kv_heads, group.v_width),
        cos=cos,
        sin=sin,
        slots=step.inputs["slots"][at],
        k_stored=cache.k.layer(op.layer),
        v_stored=cache.v.layer(op.layer),
    )
    turned = step.attention.rope_write(call)
    step.copy_written(at, op.layer)
    return (turned.view(len(q), op.out.width),)


def _paging(
    step: Step, at: int, *, full: bool, window: int | None, chunks: bool = False
) -> dict[str, Any]:
    """Returns the paging and mask fields of an `AttentionCall`.

    Layers with the same mask share one `QueryRows`.
    """
    return {
        "block_tables": step.inputs["block_tables"][at],
        "context_lens": step.inputs["context_lens"][at],
        "places": step.inputs["places"],
        "limits": step.inputs.get("limits"),
        "inputs": step.inputs,
        "batch": step.batch,
        "group": at,
        "once": step.once,
        "rows": step.once(
            (at, full, window, chunks),
            lambda: make_query_rows(
                step.batch, at, full=full, window=window, chunks=chunks, device=step.device
            ),
        ),
        "window": window,
        "chunks": chunks,
        "full": full,
    }


def _latents(op: ops.MlaAttention) -> ExpandKv:
    return lambda k, _: (k, k[..., : op.latent_width])


def _expanded(op: ops.MlaAttention, up_k: Tensor, up_v: Tensor) -> ExpandKv:
    def expand(k: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        k = k.to(up_k.dtype)
        latents, rope = k[..., 0, : op.latent_width], k[..., op.latent_width :]
        own = torch.einsum("...nl,hdl->...nhd", latents, up_k)
        v = torch.einsum("...nl,hvl->...nhv", latents, up_v)
        return torch.cat([own, rope.expand(*own.shape[:-1], op.rope_width)], dim=-1), v

    return expand


ATTENTION_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ops.Attention: attention,
    ops.MlaAttention: mla_attention,
    RopeWrite: rope_write,
}
