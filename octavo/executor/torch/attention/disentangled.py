"""Disentangled attention (`ops.PositionBuckets`), one request at a time, with all its rows in one
step.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.step import Step
from octavo.program import ops
from octavo.program.position_tables import position_buckets


def disentangled_attention(op: ops.Attention, bias: ops.PositionBuckets, step: Step) -> Tensor:
    """Computes `[T, H * v_width]`."""
    assert op.of_queries is not None and op.of_keys is not None
    at = step.program.group_index(op.group)
    stored, tables = step.kv[at], step.inputs["block_tables"][at]
    q = step.get(op.q)
    out = torch.zeros(len(q), op.out.width, dtype=q.dtype, device=q.device)
    starts = step.batch.query_starts.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        count = end - start
        if not count:
            continue
        blocks = tables[request : request + 1, : -(-count // BLOCK_SIZE)]
        k, v = (
            kept.layer(op.layer).read(blocks)[0, :count].float() for kept in (stored.k, stored.v)
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
    places = np.arange(count)
    return torch.from_numpy(position_buckets(places[:, None] - places, bias)).to(device)


def _by_head(buckets: Tensor, num_heads: int) -> Tensor:
    return buckets[:, None, :].expand(-1, num_heads, -1)
