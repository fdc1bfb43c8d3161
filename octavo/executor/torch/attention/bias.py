"""Attention score biases by distance: ALiBi slopes, T5 buckets and bidirectional windows.

Formulas and sources: `ops.AlibiBias`, `ops.T5Bias`, `ops.NearBias`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.executor.torch.attention.call import Bias
from octavo.executor.torch.step import Step
from octavo.program import ops


def make_bias(op: ops.Attention, step: Step) -> Bias | None:
    """Returns an op's bias with its tensors on the device, or None."""
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
    """Returns key place - query place, `[..., M, n]`."""
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
