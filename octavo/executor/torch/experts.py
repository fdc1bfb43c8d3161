"""Mixture-of-experts ops: routing, expert matmuls (`kernels.Kernels.grouped`) and the weighted sum;
`EXPERT_FORMULAS` is the dispatch table.

Routing is computed in fp32. `expert_ops.py` states the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.executor.torch.step import Made, Step
from octavo.program import expert_ops, rank_ops
from octavo.program.program import Op


def route(op: expert_ops.Route, step: Step) -> Made:
    logits = step.get(op.logits).float()
    scores = (
        torch.sigmoid(logits)
        if op.score == "sigmoid"
        else torch.softmax(logits, dim=-1)
        if op.score == "softmax"
        else logits
    )
    choice = scores if op.bias is None else scores + step.weights.vector(op.bias)
    if op.num_groups > 1:
        choice = _best_groups(choice, op)
    ids = _largest(choice, op.top_k)
    weights = scores.gather(1, ids)
    if op.score == "softmax_top_k":
        weights = torch.softmax(weights, dim=-1)
    elif op.score == "sigmoid_top_k":
        weights = torch.sigmoid(weights)
    elif op.score == "sparsemixer":
        weights = _get_sparsemixer_weight(logits, ids, op.jitter)
    if op.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    rows, weights = step.get(op.x).repeat_interleave(op.top_k, dim=0), weights * op.scale
    if op.factors is not None:
        weights = weights * step.weights.vector(op.factors)[ids]
    if op.scales_rows:
        rows, weights = (rows * weights.reshape(-1, 1)).to(rows.dtype), torch.ones_like(weights)
    return rows, ids, weights


def _get_sparsemixer_weight(logits: Tensor, ids: Tensor, jitter: float) -> Tensor:
    """Returns each chosen expert's sparsemixer weight among the remaining experts near it."""
    remaining, weights = logits, list[Tensor]()
    for chosen in torch.chunk(ids, ids.shape[1], dim=1):
        best = logits.gather(1, chosen)
        far = best - logits > 2 * jitter * torch.maximum(logits.abs(), best)
        gates = torch.softmax(remaining.masked_fill(far, -torch.inf), dim=-1)
        weights.append(gates.gather(1, chosen))
        remaining = remaining.scatter(1, chosen, -torch.inf)
    return torch.cat(weights, dim=1)


def _best_groups(choice: Tensor, op: expert_ops.Route) -> Tensor:
    """Masks experts outside the best groups with -inf."""
    groups = choice.view(len(choice), op.num_groups, -1)
    ranked = 2 if op.group_rank == "two_best" else 1
    rank = groups.sort(dim=-1, descending=True).values[:, :, :ranked].sum(dim=-1)
    keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, _largest(rank, op.top_groups), True)
    return groups.masked_fill(~keep[:, :, None], -torch.inf).view(choice.shape)


def _largest(x: Tensor, count: int) -> Tensor:
    """Returns the indices of each row's `count` largest values, best first; ties go to the lower
    index.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def grouped_linear(op: expert_ops.GroupedLinear, step: Step) -> Made:
    kernels = step.kernels
    rows = step.once(
        op.ids.name,
        lambda: kernels.rows_of_experts(step.get(op.ids).reshape(-1), op.weight.shape[0]),
    )
    bias = None if op.bias is None else step.weights.vector(op.bias)
    return (kernels.grouped(step.get(op.x), rows, step.weights.matrix(op.weight), bias),)


def dispatch(op: rank_ops.Dispatch, step: Step) -> Made:
    ids = step.get(op.ids)
    return (torch.where((op.first <= ids) & (ids < op.last), ids - op.first, -1),)


def combine(op: expert_ops.Combine, step: Step) -> Made:
    return (step.kernels.combined(step.get(op.x), step.get(op.weights_value)),)


EXPERT_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    expert_ops.Route: route,
    expert_ops.GroupedLinear: grouped_linear,
    rank_ops.Dispatch: dispatch,
    expert_ops.Combine: combine,
}
