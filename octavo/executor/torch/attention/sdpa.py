"""Attention in plain PyTorch on any device: gathers keys through the block tables and uses
PyTorch's scaled dot product attention.

Calls with a soft cap, sinks or a bias are computed explicitly in fp32. At most `MOST_SCORES` scores
are in memory at once. Supports every call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.attention.call import AttentionCall, StepArraysMaker
from octavo.executor.torch.attention.query_rows import Span
from octavo.program.program import Op, Program

MOST_SCORES = 1 << 26
"""Maximum number of scores computed at once."""


class Sdpa:
    """PyTorch's scaled dot product attention. Implements `AttentionKernels`.

    With `heads_apart`, a query head has the same bits however many share its KV head, so that ranks
    with copies of one KV head have the bits of the whole.
    """

    name = "sdpa"
    for_graphs = False
    is_invariant = False
    rope_write = None

    def __init__(self, *, heads_apart: bool = False) -> None:
        self._heads_apart = heads_apart

    def graph_bytes(self, program: Program, num_requests: int, max_context: int) -> int:
        return 0

    def get_arrays_maker(self, program: Program) -> StepArraysMaker:
        return lambda batch, *, fixed: {}

    def unsupported_reason(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> Tensor:
        return _attend(_with_heads_apart(call) if self._heads_apart else call)


def _with_heads_apart(call: AttentionCall) -> AttentionCall:
    """Returns a call in which each query head has a copy of its KV head."""

    def expand(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (k, v) if call.expand is None else call.expand(k, v)
        share = call.q.shape[1] // k.shape[2]
        return k.repeat_interleave(share, dim=2), v.repeat_interleave(share, dim=2)

    return replace(call, expand=expand)


class _Keys(NamedTuple):
    """Keys of requests with a single row."""

    key_indices: Tensor
    """`[R]`"""
    tables: Tensor
    context_lens: Tensor
    limits: Tensor | None
    """One past the last visible key of each row, `[R]`; None: the row's key index + 1."""


def _attend(call: AttentionCall) -> Tensor:
    rows = call.rows
    keys = _Keys(call.key_indices, call.block_tables, call.context_lens, call.limits)
    if rows.singles is None and not rows.spans:
        return _decode(call, call.q, keys)
    out = torch.zeros(
        len(call.q), call.q.shape[1], call.v_width, dtype=call.q.dtype, device=call.q.device
    )
    if rows.num_singles:
        assert rows.singles is not None and rows.rows is not None
        keys = _Keys(
            call.key_indices[rows.rows],
            call.block_tables[rows.singles],
            call.context_lens[rows.singles],
            None if call.limits is None else call.limits[rows.rows],
        )
        out[rows.rows] = _decode(call, call.q[rows.rows], keys)
    for span in rows.spans:
        out[span.start : span.stop] = _prefill(call, span)
    return out


def _decode(call: AttentionCall, q: Tensor, rows: _Keys) -> Tensor:
    """Computes requests with one row, `q [R, H, Dk]`, over the number of blocks of the longest
    request.
    """
    key_indices, tables, context_lens, limits = rows
    first, last = call.rows.first_block, call.rows.last_block
    at_once = max(1, MOST_SCORES // max(1, (last - first) * BLOCK_SIZE * q.shape[1] * 4))
    outputs = []
    for start in range(0, len(q), at_once):
        part = slice(start, start + at_once)
        keys = torch.arange(first * BLOCK_SIZE, last * BLOCK_SIZE, device=q.device)
        query_indices, limit = key_indices[part, None], context_lens[part, None]
        own = query_indices + 1 if limits is None else limits[part, None]
        seen = (keys < limit) if call.full else (keys < limit) & (keys < own)
        if call.window is not None:
            seen = seen & (keys >= _first_keys(query_indices, call.window, chunks=call.chunks))
        k, v = _gather(call, tables[part, first:last], seen)
        bias = None if call.bias is None else call.bias.make(keys[None], query_indices)
        outputs.append(_product(call, q[part, None], (k, v), seen[:, None], bias)[:, 0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _prefill(call: AttentionCall, span: Span) -> Tensor:
    """Computes one request's rows, `[t, H, v_width]`."""
    blocks = span.blocks
    keys = torch.arange(blocks.start * BLOCK_SIZE, blocks.stop * BLOCK_SIZE, device=call.q.device)
    within = ((keys >= span.first_key) & (keys < span.last_key))[None]
    k, v = _gather(call, call.block_tables[span.request : span.request + 1, blocks], within)
    at_once = max(1, MOST_SCORES // (len(keys) * call.q.shape[1]))
    outputs = []
    for start in range(span.start, span.stop, at_once):
        part = slice(start, min(start + at_once, span.stop))
        query_indices = call.key_indices[part]
        own = query_indices + 1 if call.limits is None else call.limits[part]
        seen = within if call.full else within & (keys < own[:, None])
        if call.window is not None:
            seen = seen & (
                keys >= _first_keys(query_indices, call.window, chunks=call.chunks)[:, None]
            )
        bias = None if call.bias is None else call.bias.make(keys[None], query_indices[None])
        seen = seen.expand(len(query_indices), len(keys))
        outputs.append(_product(call, call.q[None, part], (k, v), seen[None], bias)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _first_keys(key_indices: Tensor, window: int, *, chunks: bool) -> Tensor:
    """Returns each row's first visible key."""
    return key_indices - key_indices % window if chunks else key_indices + 1 - window


def _gather(call: AttentionCall, tables: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Gathers keys and values `[N, n, K, width]` of `tables [N, B]`, zero where `seen [N, n]` is
    False.

    Unused slots may contain NaN, which a weight of 0 would not remove.
    """
    k, v = (
        stored.read(tables).masked_fill(~seen[:, :, None, None], 0) for stored in (call.k, call.v)
    )
    return (k, v) if call.expand is None else call.expand(k, v)


def _product(
    call: AttentionCall, q: Tensor, kv: tuple[Tensor, Tensor], seen: Tensor, bias: Tensor | None
) -> Tensor:
    """Computes `[N, M, H, Dv]` in q's dtype from `q [N, M, H, Dk]`, `kv` (`[N, n, K, Dk]`, `[N, n,
    K, Dv]`) and `seen [N, M, n]`.

    The query heads of a KV head are rows of one matmul.
    """
    num, rows, heads, _ = q.shape
    kv_heads = kv[0].shape[2]
    share = heads // kv_heads
    kind = torch.promote_types(q.dtype, kv[0].dtype)
    queries = (
        q.view(num, rows, kv_heads, share, -1)
        .permute(0, 2, 3, 1, 4)
        .reshape(num, kv_heads, share * rows, -1)
        .to(kind)
    )
    k, v = (part.transpose(1, 2).to(kind) for part in kv)
    mask = seen[:, None].repeat(1, 1, share, 1)
    if call.softcap is None and call.sinks is None and bias is None:
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=call.scale)
    else:
        weights = _weights(call, queries, k, mask, bias)
        out = weights @ v.float()
    out = out.view(num, kv_heads, share, rows, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(num, rows, heads, -1).to(q.dtype)


def _weights(
    call: AttentionCall, q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | None
) -> Tensor:
    """Returns attention weights `[N, K, H / K * M, n] fp32` for `q [N, K, H / K * M, Dk]`."""
    num, kv_heads, _, _ = q.shape
    scores = (q.float() * call.scale) @ k.float().transpose(-1, -2)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if bias is not None:
        scores = scores + bias.expand(num, *bias.shape[1:]).reshape(scores.shape)
    scores = scores.masked_fill(~mask, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    if call.sinks is not None:
        sinks = call.sinks.view(1, kv_heads, -1, 1).expand(
            num, -1, -1, scores.shape[2] // (call.sinks.numel() // kv_heads)
        )
        sinks = sinks.reshape(num, kv_heads, -1, 1)
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if call.sinks is not None:
        total = total + torch.exp(sinks - top)
    return weights / total
