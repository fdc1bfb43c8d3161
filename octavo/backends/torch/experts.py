"""Mixtures of experts in plain torch: who gets which row, the experts' products, their weighted sum. `ops.py` states the formulas.

Routing is computed in fp32. With few rows each row's expert is gathered, which needs no word from the device; with many, experts go
one by one over their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.backends.torch.step import Made, Step
from octavo.program import ops
from octavo.program.program import Op

GATHERED_ROWS = 8
"""So many rows at most take a copy of their expert's matrix each."""


def route(op: ops.Route, step: Step) -> Made:
    logits = step.get(op.logits).float()
    scores = torch.sigmoid(logits) if op.score == "sigmoid" else torch.softmax(logits, dim=-1) if op.score == "softmax" else logits
    choice = scores if op.bias is None else scores + step.weights.vector(op.bias)
    if op.num_groups > 1:
        choice = _best_groups(choice, op.num_groups, op.top_groups)
    ids = _largest(choice, op.top_k)
    weights = scores.gather(1, ids)
    if op.score == "softmax_top_k":
        weights = torch.softmax(weights, dim=-1)
    if op.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return step.get(op.x).repeat_interleave(op.top_k, dim=0), ids, weights * op.scale


def _best_groups(choice: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """-inf for the experts outside the best groups; a group's rank is the sum of its two best."""
    groups = choice.view(len(choice), num_groups, -1)
    rank = groups.sort(dim=-1, descending=True).values[:, :, :2].sum(dim=-1)
    keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, _largest(rank, top_groups), True)
    return groups.masked_fill(~keep[:, :, None], -torch.inf).view(choice.shape)


def _largest(x: Tensor, count: int) -> Tensor:
    """Columns of each row's `count` largest, best first; the lower one of equals."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def grouped_linear(op: ops.GroupedLinear, step: Step) -> Made:
    x, experts = step.get(op.x), step.get(op.ids).reshape(-1)
    y = _gathered(op, x, experts, step) if len(x) <= GATHERED_ROWS else _one_by_one(op, x, experts, step)
    return (y if op.bias is None else (y.float() + step.weights.vector(op.bias)[experts]).to(step.dtype),)


def _gathered(op: ops.GroupedLinear, x: Tensor, experts: Tensor, step: Step) -> Tensor:
    matrices = step.weights.matrix(op.weight).take(experts).floats(step.dtype)
    return torch.bmm(matrices, x[:, :, None])[:, :, 0]


def _one_by_one(op: ops.GroupedLinear, x: Tensor, experts: Tensor, step: Step) -> Tensor:
    y = torch.empty(len(x), op.out.width, dtype=step.dtype, device=step.device)
    for expert in range(op.weight.shape[0]):
        rows = (experts == expert).nonzero()[:, 0]
        if len(rows):
            y[rows] = F.linear(x[rows], step.weights.matrix(op.weight).take(expert).floats(step.dtype))
    return y


def combine(op: ops.Combine, step: Step) -> Made:
    weights = step.get(op.weights_value)
    x = step.get(op.x).view(*weights.shape, op.out.width).float()
    total = weights[:, 0, None] * x[:, 0]
    for j in range(1, weights.shape[1]):
        total = total + weights[:, j, None] * x[:, j]
    return (total.to(step.dtype),)


EXPERT_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ops.Route: route,
    ops.GroupedLinear: grouped_linear,
    ops.Combine: combine,
}
