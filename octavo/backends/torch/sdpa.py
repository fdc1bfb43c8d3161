"""Attention in plain torch: keys gathered through the block tables, then PyTorch's own product, or
the formula in fp32.

The formula is used where a soft cap, sinks or a bias ask for it. Scores of at most `MOST_SCORES`
numbers are made at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.backends.kv import BLOCK_SIZE

if TYPE_CHECKING:
    from octavo.backends.torch.attention import AttentionCall
    from octavo.backends.torch.rows import Span

MOST_SCORES = 1 << 26


def attend(call: AttentionCall) -> Tensor:
    """`[T, H, v_width]`."""
    rows = call.rows
    if rows.singles is None and not rows.spans:
        return _decode(call, call.q, call.positions, call.block_tables, call.context_lens)
    out = torch.zeros(
        len(call.q), call.q.shape[1], call.v_width, dtype=call.q.dtype, device=call.q.device
    )
    if rows.num_singles:
        assert rows.singles is not None and rows.rows is not None
        tables, lens = call.block_tables[rows.singles], call.context_lens[rows.singles]
        out[rows.rows] = _decode(call, call.q[rows.rows], call.positions[rows.rows], tables, lens)
    for span in rows.spans:
        out[span.start : span.stop] = _prefill(call, span)
    return out


def _decode(
    call: AttentionCall, q: Tensor, positions: Tensor, tables: Tensor, context_lens: Tensor
) -> Tensor:
    """One row a request: `q [R, H, Dk]`, all tables as long as the longest."""
    first, last = call.rows.first_block, call.rows.last_block
    at_once = max(1, MOST_SCORES // max(1, (last - first) * BLOCK_SIZE * q.shape[1] * 4))
    made = []
    for start in range(0, len(q), at_once):
        part = slice(start, start + at_once)
        keys = torch.arange(first * BLOCK_SIZE, last * BLOCK_SIZE, device=q.device)
        at, limit = positions[part, None], context_lens[part, None]
        seen = (keys < limit) if call.full else (keys < limit) & (keys <= at)
        if call.window is not None:
            seen = seen & (keys > at - call.window)
        k, v = _gather(call, tables[part, first:last], seen)
        bias = None if call.bias is None else call.bias.make(keys[None], at)
        made.append(_product(call, q[part, None], (k, v), seen[:, None], bias)[:, 0])
    return made[0] if len(made) == 1 else torch.cat(made)


def _prefill(call: AttentionCall, span: Span) -> Tensor:
    """The rows of one request `[t, H, v_width]`, some at a time."""
    blocks = span.blocks
    keys = torch.arange(blocks.start * BLOCK_SIZE, blocks.stop * BLOCK_SIZE, device=call.q.device)
    within = ((keys >= span.first_key) & (keys < span.last_key))[None]
    k, v = _gather(call, call.block_tables[span.request : span.request + 1, blocks], within)
    at_once = max(1, MOST_SCORES // (len(keys) * call.q.shape[1]))
    made = []
    for start in range(span.start, span.stop, at_once):
        part = slice(start, min(start + at_once, span.stop))
        at = call.positions[part]
        seen = within if call.full else within & (keys <= at[:, None])
        if call.window is not None:
            seen = seen & (keys > at[:, None] - call.window)
        bias = None if call.bias is None else call.bias.make(keys[None], at[None])
        seen = seen.expand(len(at), len(keys))
        made.append(_product(call, call.q[None, part], (k, v), seen[None], bias)[0])
    return made[0] if len(made) == 1 else torch.cat(made)


def _gather(call: AttentionCall, tables: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[N, n, K, width]` of `tables [N, B]`; zeros where `seen [N, n]` is False,
    for what lies there may be NaN.
    """
    k, v = (
        stored.read(tables).masked_fill(~seen[:, :, None, None], 0) for stored in (call.k, call.v)
    )
    return (k, v) if call.read is None else call.read(k, v)


def _product(
    call: AttentionCall, q: Tensor, kv: tuple[Tensor, Tensor], seen: Tensor, bias: Tensor | None
) -> Tensor:
    """`q [N, M, H, Dk]`, `kv [N, n, K, Dk]` and `[N, n, K, Dv]`, `seen [N, M, n]`: `[N, M, H, Dv]`
    in q's dtype.

    The query heads of one kv head are rows of one product.
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
    """Each key's share `[N, K, H / K * M, n] fp32`, of `q [N, K, H / K * M, Dk]`."""
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
