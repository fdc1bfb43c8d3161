"""The ops of mixtures of experts: routing, the experts' products (`kernels.Kernels.grouped`) and
their weighted sum; `EXPERT_FORMULAS` is the dispatch table.

Routing is computed in fp32. `ops.py` states the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.backends.torch.step import Made, Step
from octavo.program import ops
from octavo.program.program import Op


def route(op: ops.Route, step: Step) -> Made:
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
        choice = _best_groups(choice, op.num_groups, op.top_groups)
    ids = _largest(choice, op.top_k)
    weights = scores.gather(1, ids)
    if op.score == "softmax_top_k":
        weights = torch.softmax(weights, dim=-1)
    if op.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return step.get(op.x).repeat_interleave(op.top_k, dim=0), ids, weights * op.scale


def _best_groups(choice: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Puts -inf in place of experts outside the best groups; a group ranks by the sum of its best
    two.
    """
    groups = choice.view(len(choice), num_groups, -1)
    rank = groups.sort(dim=-1, descending=True).values[:, :, :2].sum(dim=-1)
    keep = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, _largest(rank, top_groups), True)
    return groups.masked_fill(~keep[:, :, None], -torch.inf).view(choice.shape)


def _largest(x: Tensor, count: int) -> Tensor:
    """Returns the columns of each row's `count` largest numbers, best first and the lower one of
    equals.
    """
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def grouped_linear(op: ops.GroupedLinear, step: Step) -> Made:
    kernels = step.kernels
    rows = step.once(
        op.ids.name,
        lambda: kernels.rows_of_experts(step.get(op.ids).reshape(-1), op.weight.shape[0]),
    )
    bias = None if op.bias is None else step.weights.vector(op.bias)
    return (kernels.grouped(step.get(op.x), rows, step.weights.matrix(op.weight), bias),)


def combine(op: ops.Combine, step: Step) -> Made:
    return (step.kernels.combined(step.get(op.x), step.get(op.weights_value)),)


EXPERT_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ops.Route: route,
    ops.GroupedLinear: grouped_linear,
    ops.Combine: combine,
}
