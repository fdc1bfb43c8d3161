"""The attention ops of a Program: each builds an `AttentionCall` or a `RopeWriteCall` for the
chosen kernels.

`ATTENTION_FORMULAS` is the dispatch table. Formulas and sources: `ops.Attention`,
`ops.MlaAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.attention.call import AttentionCall, Bias, ExpandKv
from octavo.executor.torch.attention.query_rows import make_query_rows
from octavo.executor.torch.rope_write import RopeWrite, RopeWriteCall
from octavo.executor.torch.row_ops import angles
from octavo.executor.torch.step import Made, Step
from octavo.program import ops
from octavo.program.position_tables import position_buckets
from octavo.program.program import Op


def attention(op: ops.Attention, step: Step) -> Made:
    if isinstance(op.bias, ops.PositionBuckets):
        return (disentangled_attention(op, op.bias, step),)
    group_index = step.program.group_index(op.group)
    group, cache = step.program.groups[group_index], step.kv[group_index]
    q = step.get(op.q)
    window = op.window if op.mask in ("window", "chunk") else None
    call = AttentionCall(
        op=op,
        q=q.view(len(q), op.num_heads, group.k_width),
        k=cache.k.layer(op.layer),
        v=cache.v.layer(op.layer),
        **_paging(
            step, group_index, full=op.mask == "full", window=window, chunks=op.mask == "chunk"
        ),
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
    group_index = step.program.group_index(op.group)
    cache = step.kv[group_index]
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
        **_paging(step, group_index, full=False, window=None),
        scale=op.scale,
        v_width=op.latent_width if absorbed else op.v_width,
        expand=_latents(op) if absorbed else _expand(op, up_k, up_v),
    )
    out = step.attention.attend(call)
    if absorbed:
        out = torch.einsum("thl,hvl->thv", out, up_v)
    return (out.reshape(len(out), op.out.width),)


def rope_write(op: RopeWrite, step: Step) -> Made:
    group_index = step.program.group_index(op.group)
    group, cache = step.program.groups[group_index], step.kv[group_index]
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
        slots=step.inputs["slots"][group_index],
        k_stored=cache.k.layer(op.layer),
        v_stored=cache.v.layer(op.layer),
    )
    turned = step.attention.rope_write(call)
    step.copy_written(group_index, op.layer)
    return (turned.view(len(q), op.out.width),)


def _paging(
    step: Step, group_index: int, *, full: bool, window: int | None, chunks: bool = False
) -> dict[str, Any]:
    """Returns the paging and mask fields of an `AttentionCall`.

    Layers with the same mask share one `QueryRows`.
    """
    return {
        "block_tables": step.inputs["block_tables"][group_index],
        "context_lens": step.inputs["context_lens"][group_index],
        "key_indices": step.inputs["key_indices"],
        "limits": step.inputs.get("limits"),
        "inputs": step.inputs,
        "batch": step.batch,
        "group": group_index,
        "once": step.once,
        "rows": step.once(
            (group_index, full, window, chunks),
            lambda: make_query_rows(
                step.batch, group_index, full=full, window=window, chunks=chunks, device=step.device
            ),
        ),
        "window": window,
        "chunks": chunks,
        "full": full,
    }


def _latents(op: ops.MlaAttention) -> ExpandKv:
    return lambda k, _: (k, k[..., : op.latent_width])


def _expand(op: ops.MlaAttention, up_k: Tensor, up_v: Tensor) -> ExpandKv:
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


def disentangled_attention(op: ops.Attention, bias: ops.PositionBuckets, step: Step) -> Tensor:
    """Computes `[T, H * v_width]`.

    Disentangled attention (`ops.PositionBuckets`), one request at a time, with all its rows in
    one step.
    """
    assert op.of_queries is not None and op.of_keys is not None
    group_index = step.program.group_index(op.group)
    stored, tables = step.kv[group_index], step.inputs["block_tables"][group_index]
    q = step.get(op.q)
    out = torch.zeros(len(q), op.out.width, dtype=q.dtype, device=q.device)
    starts = step.batch.query_starts.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        count = end - start
        if not count:
            continue
        blocks = tables[request : request + 1, : -(-count // BLOCK_SIZE)]
        k, v = (
            cached.layer(op.layer).read(blocks)[0, :count].float()
            for cached in (stored.k, stored.v)
        )
        own, of_queries, of_keys = (
            step.get(value)[start:end].float().view(count, op.num_heads, -1)
            for value in (op.q, op.of_queries, op.of_keys)
        )
        buckets = _buckets(bias, count, q.device)
        scores = torch.einsum("thd,jhd->thj", own, k)
        scores = scores + of_queries.gather(2, _by_head(buckets, op.num_heads))
        its = of_keys.gather(2, _by_head(buckets.T, op.num_heads))
        shares = torch.softmax(op.scale * (scores + its.permute(2, 1, 0)), dim=-1)
        read = torch.einsum("thj,jhd->thd", shares, v)
        out[start:end] = read.reshape(count, -1).to(q.dtype)
    return out


def _buckets(bias: ops.PositionBuckets, count: int, device: torch.device) -> Tensor:
    """Returns the bucket of each query-key pair, `[count, count]`."""
    key_indices = np.arange(count)
    return torch.from_numpy(position_buckets(key_indices[:, None] - key_indices, bias)).to(device)


def _by_head(buckets: Tensor, num_heads: int) -> Tensor:
    return buckets[:, None, :].expand(-1, num_heads, -1)


def make_bias(op: ops.Attention, step: Step) -> Bias | None:
    """Returns an op's bias with its tensors on the device, or None.

    Formulas and sources: `ops.AlibiBias`, `ops.T5Bias`, `ops.NearBias`.
    """
    bias = op.bias
    if isinstance(bias, ops.T5Bias):
        return _t5_bias(bias, step)
    if isinstance(bias, ops.AlibiBias):
        slopes = step.weights.constant(bias).float()
        return Bias(
            lambda keys, queries: slopes[:, None, None] * _distance(keys, queries)[..., None, :, :],
            slopes=slopes,
        )
    if isinstance(bias, ops.NearBias):
        return _near_bias(bias, op.num_heads, step)
    return None


def _near_bias(bias: ops.NearBias, num_heads: int, step: Step) -> Bias:
    def far(distance: Tensor) -> Tensor:
        zero = torch.zeros((), device=step.device)
        return torch.where(distance.abs() > bias.reach, ops.FAR, zero)

    def make(keys: Tensor, queries: Tensor) -> Tensor:
        added = far(_distance(keys, queries))[..., None, :, :]
        return added.expand(*added.shape[:-3], num_heads, -1, -1)

    def by_distance() -> Tensor:
        end = bias.reach + 1
        added = far(torch.arange(-end, end + 1, device=step.device))
        return added.expand(num_heads, -1).contiguous()

    return Bias(make, by_distance=lambda: step.once(bias, by_distance))


def _t5_bias(bias: ops.T5Bias, step: Step) -> Bias:
    table = step.weights.vector(bias.table)

    def by_distance() -> Tensor:
        far = torch.arange(-bias.max_distance, bias.max_distance + 1, device=step.device)
        return table[t5_buckets(far, bias)].T.contiguous()

    def make(keys: Tensor, queries: Tensor) -> Tensor:
        return table[t5_buckets(_distance(keys, queries), bias)].movedim(-1, -3)

    return Bias(make, by_distance=lambda: step.once(bias, by_distance))


def _distance(keys: Tensor, queries: Tensor) -> Tensor:
    """Returns key index - query index, `[..., M, n]`."""
    return keys[..., None, :] - queries[..., :, None]


def t5_buckets(distance: Tensor, bias: ops.T5Bias) -> Tensor:
    """Returns the bucket of each distance, like `program.t5_buckets`."""
    num_buckets = bias.num_buckets // 2 if bias.bidirectional else bias.num_buckets
    right = (
        (distance > 0).long() * num_buckets if bias.bidirectional else torch.zeros_like(distance)
    )
    away = distance.abs() if bias.bidirectional else (-distance).clamp(min=0)
    exact = num_buckets // 2
    spread = torch.tensor(bias.max_distance / exact, dtype=torch.float64).log()
    octaves = (away.clamp(min=exact).double() / exact).log() / spread.item()
    far = (exact + (octaves * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return right + torch.where(away < exact, away, far)
