"""Reference formulas of attention over the paged cache, in float64: masks, biases, sinks, latent
attention.

Each query row attends separately to its visible keys, in splits of 256 keys at fixed indices. Each
split has its own (m, l, acc), and splits are merged left to right, so a row's bits depend only on
its index and its request's keys. Sources: `ops.Attention` and `ops.MlaAttention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE, SPLIT_KEYS
from octavo.executor.reference.step import (
    Floats,
    Made,
    ReferenceStep,
    matvecs,
    sparse_rows,
)
from octavo.program import ops
from octavo.program.key_selection import LAST_BLOCKS, KeySelection
from octavo.program.position_tables import position_buckets
from octavo.program.program import Op
from octavo.program.t5_buckets import t5_buckets

Adjust = Callable[[Floats, NDArray[np.int64]], Floats]
"""Applies softcap and bias to scores `[H, n]` of keys at the indices `[n]`."""


@dataclass(frozen=True, slots=True)
class Keys:
    """One request's keys and values of a layer, `[n, K, width]`, starting at key index `start`."""

    start: int
    k: Floats
    v: Floats


@dataclass(frozen=True, slots=True)
class Query:
    """One row of the step: index, key index, and visible keys `first` to `last - 1`."""

    row: int
    key_index: int
    first: int
    last: int


def attention(op: ops.Attention, step: ReferenceStep) -> Made:
    q = step.get(op.q).reshape(-1, op.num_heads, step.program.group(op.group).k_width)
    out = np.zeros((len(q), op.out.width))
    sinks = None if op.sinks is None else step.weights[op.sinks]
    for queries, keys in _requests(op, op.mask, op.window, step):
        for query in queries:
            adjust = _adjustment(op, query, step)
            seen = _select(op, query, keys, step)
            out[query.row] = attend(q[query.row] * op.scale, *seen, adjust, sinks).reshape(-1)
    return (out,)


def _select(op: ops.Attention, query: Query, keys: Keys, step: ReferenceStep) -> tuple[Keys, Query]:
    """Returns the keys that a query reads (compacted if it selects some of them) and the query
    relative to them.
    """
    if op.selection is None or not sparse_rows(len(step.batch.key_indices), step)[query.row, 0]:
        return keys, query
    assert op.partial_q is not None
    masses = _block_masses(op, op.selection, query, step)
    chosen = chosen_blocks(masses, op.selection)
    key_indices = (chosen[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
    key_indices = key_indices[key_indices < query.last] - keys.start
    own = Keys(0, keys.k[key_indices], keys.v[key_indices])
    return own, Query(query.row, len(key_indices) - 1, 0, len(key_indices))


def chosen_blocks(masses: Floats, selection: KeySelection) -> NDArray[np.int64]:
    """Returns the blocks that a row reads, in order, given its attention per block `[blocks]`."""
    ranked = masses.copy()
    ranked[0] = np.inf
    ranked[-LAST_BLOCKS:] = np.inf
    order = np.lexsort((np.arange(len(ranked)), -ranked))
    return np.sort(order[: selection.num_blocks(len(ranked))])


def _block_masses(
    op: ops.Attention, selection: KeySelection, query: Query, step: ReferenceStep
) -> Floats:
    """Returns a query's attention mass per block from partial keys, summed over heads."""
    assert op.partial_q is not None
    group = step.program.group_index(selection.group)
    request = int(np.searchsorted(step.batch.query_starts, query.row, side="right")) - 1
    key_indices = np.arange(query.last)
    blocks = step.batch.block_tables[group, request][key_indices // BLOCK_SIZE]
    k = step.kv[group].k[selection.layer][blocks, key_indices % BLOCK_SIZE].astype(np.float64)
    q = step.get(op.partial_q)[query.row].reshape(k.shape[1], -1, k.shape[2])
    scores = op.scale * (q @ k.transpose(1, 2, 0)).reshape(op.num_heads, -1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    masses = np.zeros(-(-query.last // BLOCK_SIZE))
    np.add.at(masses, key_indices // BLOCK_SIZE, shares)
    return masses


def mla_attention(op: ops.MlaAttention, step: ReferenceStep) -> Made:
    """Computes latent attention.

    Absorbed: one shared head of latents, with q projected to latent space. Expanded: separate keys
    and values per head.
    """
    q_nope = step.get(op.q_nope).reshape(-1, op.num_heads, op.nope_width)
    q_rope = step.get(op.q_rope).reshape(-1, op.num_heads, op.rope_width)
    heads = step.weights[op.kv_b].reshape(op.num_heads, op.nope_width + op.v_width, op.latent_width)
    up_k, up_v = heads[:, : op.nope_width], heads[:, op.nope_width :]
    out = np.zeros((len(q_nope), op.out.width))
    for queries, cached in _requests(op, "causal", None, step):
        latents, k_rope = cached.k[:, :, : op.latent_width], cached.k[:, :, op.latent_width :]
        if op.form == "absorbed":
            keys = Keys(cached.start, cached.k, np.ascontiguousarray(latents))
        else:
            keys = _expand(op, cached.start, latents, k_rope, step)
        for query in queries:
            part = q_nope[query.row]
            if op.form == "absorbed":
                part = (part[:, None, :] @ up_k)[:, 0]
            q = np.concatenate([part, q_rope[query.row]], axis=1)
            value = attend(q * op.scale, keys, query, None, None)
            if op.form == "absorbed":
                value = (up_v @ value[:, :, None])[:, :, 0]
            out[query.row] = value.reshape(-1)
    return (out,)


def _expand(
    op: ops.MlaAttention, start: int, latents: Floats, k_rope: Floats, step: ReferenceStep
) -> Keys:
    """Expands latents to keys and values per head."""
    full = matvecs(step.weights[op.kv_b], np.ascontiguousarray(latents[:, 0])).reshape(
        len(latents), op.num_heads, -1
    )
    shared = np.broadcast_to(k_rope, (len(latents), op.num_heads, op.rope_width))
    k = np.concatenate([full[:, :, : op.nope_width], shared], axis=2)
    return Keys(start, k, np.ascontiguousarray(full[:, :, op.nope_width :]))


def attend(
    q: Floats, keys: Keys, query: Query, adjust: Adjust | None, sinks: Floats | None
) -> Floats:
    """Returns the attention output `[H, v_width]` of scaled queries `q [H, k_width]`."""
    num_heads, num_kv_heads = len(q), keys.k.shape[1]
    m, l = np.full(num_heads, -np.inf), np.zeros(num_heads)  # noqa: E741 (the papers' name)
    acc = np.zeros((num_heads, keys.v.shape[2]))
    q = q.reshape(num_kv_heads, -1, q.shape[1])
    for a, b in _splits(query.first, query.last):
        k, v = keys.k[a - keys.start : b - keys.start], keys.v[a - keys.start : b - keys.start]
        scores = (q @ k.transpose(1, 2, 0)).reshape(num_heads, b - a)
        if adjust is not None:
            scores = adjust(scores, np.arange(a, b))
        top = np.maximum(m, scores.max(axis=1))
        p = np.exp(scores - top[:, None])
        decay = np.exp(m - top)
        l = l * decay + p.sum(axis=1)  # noqa: E741
        weighted = p.reshape(num_kv_heads, -1, b - a) @ v.transpose(1, 0, 2)
        acc = acc * decay[:, None] + weighted.reshape(acc.shape)
        m = top
    if sinks is not None:
        top = np.maximum(m, sinks)
        decay = np.exp(m - top)
        l, acc = l * decay + np.exp(sinks - top), acc * decay[:, None]  # noqa: E741
    out: Floats = acc / l[:, None]
    return out


def _splits(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Splits the keys first..last-1 at multiples of 256."""
    for split in range(first // SPLIT_KEYS, -(-last // SPLIT_KEYS)):
        yield max(first, split * SPLIT_KEYS), min(last, (split + 1) * SPLIT_KEYS)


def _adjustment(op: ops.Attention, query: Query, step: ReferenceStep) -> Adjust | None:
    """Returns a function that applies softcap and bias to a query's scores."""
    if isinstance(op.bias, ops.PositionBuckets):
        return _make_position_adjust(op, op.bias, query, step)
    softcap, add_bias = op.softcap, _bias(op.bias, query.key_index, step)
    if softcap is None:
        return add_bias

    def adjust(scores: Floats, keys: NDArray[np.int64]) -> Floats:
        capped: Floats = softcap * np.tanh(scores / softcap)
        return capped if add_bias is None else add_bias(capped, keys)

    return adjust


def _bias(
    bias: ops.T5Bias | ops.AlibiBias | ops.NearBias | None, key_index: int, step: ReferenceStep
) -> Adjust | None:
    """Returns a function that adds the bias for a query at `key_index`, or None."""
    if isinstance(bias, ops.T5Bias):
        table = step.weights[bias.table]
        return lambda scores, keys: scores + table[t5_buckets(keys - key_index, bias)].T
    if isinstance(bias, ops.AlibiBias):
        slopes = np.array(bias.slopes)
        return lambda scores, keys: scores + slopes[:, None] * (keys - key_index)
    if isinstance(bias, ops.NearBias):
        reach = bias.reach
        return lambda scores, keys: scores + np.where(abs(keys - key_index) > reach, ops.FAR, 0.0)
    return None


def _make_position_adjust(
    op: ops.Attention, bias: ops.PositionBuckets, query: Query, step: ReferenceStep
) -> Adjust:
    """Returns a function that adds position scores to a query's scores; all rows of the request are
    in the step.
    """
    assert op.of_queries is not None and op.of_keys is not None
    of_queries, of_keys = (
        step.get(value).reshape(-1, op.num_heads, bias.num_buckets)
        for value in (op.of_queries, op.of_keys)
    )
    own, first = of_queries[query.row], query.row - query.key_index

    def adjust(scores: Floats, keys: NDArray[np.int64]) -> Floats:
        buckets = position_buckets(query.key_index - keys, bias)
        its = of_keys[first + keys, :, buckets].T
        added: Floats = scores + op.scale * (own[:, buckets] + its)
        return added

    return adjust


def _requests(
    op: ops.Attention | ops.MlaAttention,
    mask: ops.MaskKind,
    window: int | None,
    step: ReferenceStep,
) -> Iterator[tuple[list[Query], Keys]]:
    """Yields each request's rows (without padding) and all keys that they see."""
    group = step.program.group_index(op.group)
    starts = step.batch.query_starts
    for request in range(len(starts) - 1):
        context = int(step.batch.context_lens[group, request])
        queries = [
            _query(step.batch, row, context, mask, window)
            for row in range(starts[request], starts[request + 1])
            if step.live[row]
        ]
        queries = [query for query in queries if query.first < query.last]
        if queries:
            span = range(
                min(query.first for query in queries), max(query.last for query in queries)
            )
            yield queries, _read(op, step, group, request, span)


def _query(
    batch: StepBatch, row: int, context: int, mask: ops.MaskKind, window: int | None
) -> Query:
    key_index = int(batch.key_indices[row])
    if mask == "full":
        return Query(row, key_index, 0, context)
    first = 0
    if window is not None:
        first = (
            key_index - key_index % window if mask == "chunk" else max(0, key_index + 1 - window)
        )
    limit = key_index + 1 if batch.limits is None else int(batch.limits[row])
    return Query(row, key_index, first, min(limit, context))


def _read(
    op: ops.Attention | ops.MlaAttention, step: ReferenceStep, group: int, request: int, span: range
) -> Keys:
    """Gathers a range of keys through the block table."""
    key_indices = np.arange(span.start, span.stop)
    blocks = step.batch.block_tables[group, request][key_indices // BLOCK_SIZE]
    index = (blocks, key_indices % BLOCK_SIZE)
    arrays = step.kv[group]
    return Keys(
        span.start,
        arrays.k[op.layer][index].astype(np.float64),
        arrays.v[op.layer][index].astype(np.float64),
    )


ATTENTION_FORMULAS: dict[type[Op], Callable[[Any, ReferenceStep], Made]] = {
    ops.Attention: attention,
    ops.MlaAttention: mla_attention,
}
