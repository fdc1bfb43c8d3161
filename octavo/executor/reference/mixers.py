"""Reference formulas of ops that mix a request's rows without attention, in float64;
`MIXER_FORMULAS` is the dispatch table.

`program/mixers.py` states the formulas. A state block has two states, each with its token count: a
step reads the one at its start and writes the other, so a recomputed step reads the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.reference.ops import ACTIVATIONS
from octavo.executor.reference.step import (
    Floats,
    GroupArrays,
    Made,
    ReferenceStep,
)
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.program import Op


def short_conv(op: ShortConv, step: ReferenceStep) -> Made:
    x, weight = step.get(op.x), step.weights[op.weight][:, 0]
    if op.factors:
        weight = weight * np.repeat(op.factors, [part.width for part in op.outs])[:, None]
    out = np.zeros_like(x)
    group = step.program.group_index(op.group)
    rows = step.kv[group].k[op.layer, :, :, 0]
    for request, a, b in _live_requests(step):
        table = step.batch.block_tables[group, request]
        for t in range(a, b):
            key_index, own = int(step.batch.key_indices[t]), weight.shape[1] - 1
            for tap in range(max(0, own - key_index), own):
                block, offset = divmod(key_index - own + tap, BLOCK_SIZE)
                out[t] += weight[:, tap] * rows[table[block], offset].astype(np.float64)
            out[t] += weight[:, own] * x[t]
    if op.bias is not None:
        out += step.weights[op.bias]
    if op.activation is not None:
        out = ACTIVATIONS[op.activation](out)
    return tuple(np.split(out, np.cumsum([part.width for part in op.outs])[:-1], axis=1))


def selective_scan(op: SelectiveScan, step: ReferenceStep) -> Made:
    x, out = step.get(op.x), np.zeros_like(step.get(op.x))
    rates = _rates(op, step)
    a = np.exp(step.weights[op.a_log]).reshape(op.num_heads, 1, -1)
    skip = np.zeros(op.num_heads) if op.skip is None else step.weights[op.skip]
    beta = None if op.beta is None else step.get(op.beta)
    group = step.program.group_index(op.group)
    heads = op.num_heads // op.num_runs

    def by_head(runs: Floats) -> Floats:
        return np.repeat(runs.reshape(op.num_runs, 1, op.state_size), heads, axis=0)

    for request, first, end in _live_requests(step):
        key_index, block = (
            int(step.batch.key_indices[first]),
            step.batch.block_tables[group, request, 0],
        )
        block_states = StateBlock(step.kv[group], op.layer, int(block))
        state = block_states.read(key_index)
        for t in range(first, end):
            rows = x[t].reshape(op.num_heads, -1)
            rate = rates[t].reshape(op.num_heads, -1)
            decay = np.exp(-rate[:, None, :] * a)
            state, place_of = decay * state, by_head(step.get(op.b)[t])
            if beta is None:
                entering = rate * rows
            else:
                entering = beta[t][:, None] * (rows - (state * place_of).sum(axis=-1))
            state = block_states.rounded(state + entering[:, :, None] * place_of)
            mixed = (state * by_head(step.get(op.c)[t])).sum(axis=-1)
            out[t] = (mixed + skip[:, None] * rows).reshape(-1)
        block_states.write(key_index, key_index + end - first, state)
    return (out,)


def _rates(op: SelectiveScan, step: ReferenceStep) -> Floats:
    """Returns the step sizes of all rows, `[T, H]` or `[T, H * N]`."""
    dt = step.get(op.dt)
    if op.dt_bias is not None:
        dt = dt + step.weights[op.dt_bias]
    rates: Floats = np.clip(np.logaddexp(dt, 0.0), op.low, op.high)
    return rates


class StateBlock:
    """The two states of one request and layer."""

    def __init__(self, arrays: GroupArrays, layer: int, block: int) -> None:
        self._states = arrays.k[layer, block]
        self._counts = arrays.v[layer, block]

    def read(self, num_tokens: int) -> Floats:
        """Returns the state after `num_tokens` tokens: zeros for 0, NaN if it is not stored."""
        if num_tokens == 0:
            return np.zeros(self._states.shape[1:])
        matching = np.flatnonzero(self._counts == num_tokens)
        if not len(matching):
            return np.full(self._states.shape[1:], np.nan)
        state: Floats = self._states[matching[0]].astype(np.float64)
        return state

    def rounded(self, state: Floats) -> Floats:
        """Rounds a state as when stored, so that results do not depend on where steps end."""
        as_stored: Floats = state.astype(self._states.dtype).astype(np.float64)
        return as_stored

    def write(self, read: int, num_tokens: int, state: Floats) -> None:
        """Stores the state after `num_tokens` tokens beside the one that was `read`."""
        index = 1 if read and self._counts[0] == read else 0
        if not read:
            self._counts[1] = -1  # the block may contain an earlier request's states
        self._counts[index] = num_tokens
        self._states[index] = state


def _live_requests(step: ReferenceStep) -> Iterator[tuple[int, int, int]]:
    """Yields the requests with rows, as (request, first row, end row); padding is skipped."""
    for request, (first, end) in enumerate(pairwise(step.batch.query_starts.tolist())):
        if first < end and step.live[first]:
            yield request, first, end


MIXER_FORMULAS: dict[type[Op], Callable[[Any, ReferenceStep], Made]] = {
    ShortConv: short_conv,
    SelectiveScan: selective_scan,
}
