"""Ops that mix a request's rows without attention, in plain PyTorch; `MIXER_FORMULAS` is the
dispatch table.

`program/mixers.py` states the formulas, computed in fp32 and rounded once. A block of a `state`
group has two states, each with its token count: a step reads the one at its start and writes the
other, so a recomputed step reads the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.kv_cache import GroupTensors, TorchKvCache
from octavo.executor.torch.plain import ACTIVATIONS
from octavo.executor.torch.step import Made, Step
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.program import Op, Program


def short_conv(op: ShortConv, step: Step) -> Made:
    group_index = step.program.group_index(op.group)
    x, weight = step.get(op.x).float(), step.weights.vector(op.weight)[:, 0]
    if op.factors:
        widths = torch.tensor([part.width for part in op.outs])
        factors = torch.tensor(op.factors).repeat_interleave(widths)
        weight = weight * factors[:, None].to(step.device)
    own = weight.shape[1] - 1
    key_indices, tables = step.inputs["key_indices"].long(), _get_row_tables(step, group_index)
    rows = step.kv[group_index].k.layer(op.layer).numbers[:, :, 0]
    out = torch.zeros_like(x)
    for tap in range(own):
        earlier = key_indices - own + tap
        clamped = earlier.clamp(min=0)
        blocks = tables.gather(1, (clamped // BLOCK_SIZE)[:, None])[:, 0]
        row = torch.where((earlier >= 0)[:, None], rows[blocks, clamped % BLOCK_SIZE], 0.0)
        out = out + weight[:, tap] * row
    out = out + weight[:, own] * x
    if op.bias is not None:
        out = out + step.weights.vector(op.bias)
    if op.activation is not None:
        out = ACTIVATIONS[op.activation](out)
    return torch.split(out.to(step.dtype), [part.width for part in op.outs], dim=1)


def _get_row_tables(step: Step, group: int) -> Tensor:
    """Returns the block table of each row's request, `[T, B]`; padding uses the last request's."""

    def find() -> Tensor:
        tables, ends = step.inputs["block_tables"][group], step.inputs["query_starts"][1:]
        rows = torch.arange(
            step.inputs["key_indices"].shape[0], device=step.device, dtype=ends.dtype
        )
        request = torch.searchsorted(ends, rows, right=True).clamp(max=len(tables) - 1)
        return tables[request].long()

    return step.once(("tables of rows", group), find)


def selective_scan(op: SelectiveScan, step: Step) -> Made:
    x = step.get(op.x).float()
    if not len(x):
        return (step.get(op.x),)
    spans = step.once("spans", lambda: RequestSpans.of(step))
    rows = _ScanRows.of(op, step)
    group = step.program.group_index(op.group)
    states = StateSlots.of(step.kv[group], op.layer, step.inputs["slots"][group], spans)
    state = states.read()
    # Requests with fewer rows write to an additional last row, which is never read.
    out = torch.empty(len(x) + 1, *rows.x.shape[1:], device=x.device)
    for index in range(spans.longest):
        rows_of_requests = (spans.firsts + index).clamp(max=len(x) - 1)
        state_after, mixed = rows.advance(state, rows_of_requests)
        if index < spans.shortest:
            state, target = state_after, rows_of_requests
        else:
            active = index < spans.counts
            state = torch.where(active[:, None, None, None], state_after, state)
            target = torch.where(active, rows_of_requests, len(x))
        out[target] = mixed
    states.write(state)
    read = out[:-1]
    if op.skip is not None:
        read = read + step.weights.vector(op.skip)[:, None] * rows.x
    return (read.flatten(1).to(step.dtype),)


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpans:
    """Rows of a step's `R` requests."""

    firsts: Tensor
    """First row of each request, `[R]`; arbitrary for requests without rows."""
    counts: Tensor
    """`[R]`"""
    key_indices: Tensor
    """Key index of each request's first row, `[R]`."""
    shortest: int
    longest: int
    """Smallest and largest number of rows of a request."""

    @staticmethod
    def of(step: Step) -> RequestSpans:
        starts, key_indices = step.inputs["query_starts"].long(), step.inputs["key_indices"]
        firsts = starts[:-1].clamp(max=len(key_indices) - 1)
        counts = np.diff(step.batch.query_starts)
        return RequestSpans(
            firsts,
            starts[1:] - starts[:-1],
            key_indices[firsts].long(),
            int(counts.min(initial=0)),
            int(counts.max(initial=0)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _ScanRows:
    """Inputs of a scan, in fp32."""

    x: Tensor
    """`[T, H, P]`"""
    rates: Tensor
    """Step sizes, `[T, H, 1]`, or `[T, H, N]` with the delta rule."""
    b: Tensor
    c: Tensor
    """`[T, H, 1, N]`, with one head if shared by all."""
    a: Tensor
    """Decay rates, `[H, 1, N]`, or `[H, 1, 1]` if equal for a head."""
    beta: Tensor | None
    """Update rates of the delta rule, `[T, H, 1]`."""

    @staticmethod
    def of(op: SelectiveScan, step: Step) -> _ScanRows:
        x, dt = step.get(op.x).float(), step.get(op.dt).float()
        if op.dt_bias is not None:
            dt = dt + step.weights.vector(op.dt_bias)
        rates = torch.logaddexp(dt, torch.zeros_like(dt)).clamp(op.low, op.high)

        def by_head(runs: Tensor) -> Tensor:
            runs = runs.float().view(len(x), op.num_runs, 1, op.state_size)
            return (
                runs.repeat_interleave(op.num_heads // op.num_runs, 1) if op.num_runs > 1 else runs
            )

        return _ScanRows(
            x.view(len(x), op.num_heads, -1),
            rates.view(len(x), op.num_heads, rates.shape[1] // op.num_heads),
            by_head(step.get(op.b)),
            by_head(step.get(op.c)),
            step.weights.vector(op.a_log).exp().view(op.num_heads, 1, -1),
            None if op.beta is None else step.get(op.beta).float()[:, :, None],
        )

    def advance(self, state: Tensor, row_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Advances the state `[R, H, P, N]` by one row per request; returns it and the output `[R,
        H, P]`.
        """
        rates = self.rates[row_ids]
        decayed = torch.exp(-rates[:, :, None] * self.a) * state
        if self.beta is None:
            entering = rates * self.x[row_ids]
        else:
            entering = self.beta[row_ids] * (
                self.x[row_ids] - (decayed * self.b[row_ids]).sum(dim=-1)
            )
        after = decayed + entering[..., None] * self.b[row_ids]
        return after, (after * self.c[row_ids]).sum(dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class StateSlots:
    """The two states of each request in one layer."""

    states: Tensor
    """`[blocks + 1, 2, H, P, N]`"""
    kept: Tensor
    """Tokens that each state covers, `[blocks + 1, 2]`."""
    blocks: Tensor
    """Block of each request, `[R]`; the spare one without rows."""
    begins: Tensor
    """Tokens of each request before the step, `[R]`."""
    ends: Tensor
    """Tokens of each request after the step, `[R]`."""

    @staticmethod
    def of(group: GroupTensors, layer: int, slots: Tensor, spans: RequestSpans) -> StateSlots:
        blocks = torch.where(spans.counts > 0, slots[spans.firsts] // BLOCK_SIZE, group.num_blocks)
        return StateSlots(
            group.k.layer(layer).numbers,
            group.v.layer(layer).numbers,
            blocks,
            spans.key_indices,
            spans.key_indices + spans.counts,
        )

    def read(self) -> Tensor:
        """Returns the states before the step, `[R, H, P, N]`: zeros at a request's start, NaN if
        the block holds a different state.
        """
        is_stored = self._is_current
        state = self.states[self.blocks, (~is_stored[:, 0]).long()]
        known = is_stored.any(dim=1)[:, None, None, None]
        state = torch.where(known, state, torch.nan)
        return torch.where((self.begins == 0)[:, None, None, None], 0.0, state)

    def write(self, states: Tensor) -> None:
        """Stores the states after the step in the half of each block that was not read."""
        fresh = self.begins == 0
        target = (self._is_current[:, 0] & ~fresh).long()
        token_counts = self.kept[self.blocks]
        token_counts[:, 1] = torch.where(
            fresh, -1.0, token_counts[:, 1]
        )  # clear what an earlier request has left
        token_counts.scatter_(1, target[:, None], self.ends[:, None].to(token_counts.dtype))
        self.kept[self.blocks] = token_counts
        self.states[self.blocks, target] = states

    @property
    def _is_current(self) -> Tensor:
        """Whether each of the two states covers the tokens before the step, `[R, 2]`."""
        return self.kept[self.blocks] == self.begins[:, None]


@contextmanager
def states_kept(program: Program, batch: StepBatch, kv: TorchKvCache) -> Iterator[None]:
    """Keeps the states from before a step whose rows the caller computes in separate steps. Each
    block then has the same two states as after a single step, so draft tokens can be rejected.
    """
    requests = np.flatnonzero(np.diff(batch.query_starts) > 1)
    firsts = batch.query_starts[requests]
    begins, slots = batch.key_indices[firsts], batch.slots[:, firsts]
    kept = [
        KeptStates.of(kv.groups[index], layer, slots[index], begins)
        for index, group in enumerate(program.groups)
        if group.kind == "state" and len(requests)
        for layer in range(group.num_layers)
    ]
    yield
    for states in kept:
        states.restore()


@dataclass(frozen=True, slots=True, eq=False)
class KeptStates:
    """Copies of states in one layer, of `K` requests that have one before the step."""

    slots: StateSlots
    before: Tensor
    """`[K, H, P, N]`"""

    @staticmethod
    def of(
        group: GroupTensors,
        layer: int,
        slots: NDArray[np.int32],
        begins: NDArray[np.int32],
    ) -> KeptStates:
        """`slots` and `begins [R]`: slot and key index of each request's first row."""
        states, token_counts = group.k.layer(layer).numbers, group.v.layer(layer).numbers
        blocks = torch.from_numpy(slots // BLOCK_SIZE).long().to(states.device)
        firsts = torch.from_numpy(begins).long().to(states.device)
        is_current = token_counts[blocks] == firsts[:, None]
        known = is_current.any(dim=1) & (firsts > 0)
        blocks, firsts, is_current = blocks[known], firsts[known], is_current[known]
        before = states[blocks, (~is_current[:, 0]).long()]
        return KeptStates(StateSlots(states, token_counts, blocks, firsts, firsts), before)

    def restore(self) -> None:
        """Replaces the older state of each block."""
        slots = self.slots
        older = slots.kept[slots.blocks].argmin(dim=1)
        slots.states[slots.blocks, older] = self.before
        slots.kept[slots.blocks, older] = slots.begins.to(slots.kept.dtype)


MIXER_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ShortConv: short_conv,
    SelectiveScan: selective_scan,
}
