"""The kinds of op of a mixture of experts: the choice of experts for each row, their products, and
the sum of what they make. Shapes use the alphabet of `ops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.api.errors import UnsupportedModel
from octavo.program.ops import Activation, Gate
from octavo.program.program import Op, Value, Weight

Score = Literal["softmax", "sigmoid", "softmax_top_k", "sigmoid_top_k", "sparsemixer"]
"""Formula that turns the logits of a row's experts into their weights."""


GroupRank = Literal["two_best", "best"]
"""Measure by which groups of experts rank: the sum of their two best scores, or their best."""


@dataclass(frozen=True, slots=True)
class Route(Op):
    """Choice of `top_k` experts for each row, which lays the row out once for each of them.

    `x [T, W]`, `logits [T, E]`; makes (rows [T*k, W] of axis expert_rows in the order t*k + j, ids
    [T, k] int, weights [T, k]). score = softmax or sigmoid over all experts, `softmax_top_k` or
    `sigmoid_top_k`: that of the chosen logits only, the choice being by logits, or `sparsemixer`
    (`jitter` below). The choice is by score plus `bias [E]` (DeepSeek-V3), among the best
    `top_groups` of `num_groups` groups of experts, which rank by `group_rank`: the sum of their two
    best, or their best. The weights are the scores without the bias, divided by their sum with
    `normalize`, times `scale`. Ties: the lower id.
    """

    x: Value
    logits: Value
    outs: tuple[Value, Value, Value]
    num_experts: int
    top_k: int
    score: Score = "softmax"
    bias: Weight | None = None
    num_groups: int = 1
    top_groups: int = 1
    group_rank: GroupRank = "two_best"
    normalize: bool = False
    scale: float = 1.0
    scales_rows: bool = False
    """Whether the rows are multiplied with their weights, which then are 1 (Llama 4)."""
    jitter: float = 0.0
    """Margin of `sparsemixer`, where an expert's weight is the softmax over itself and the experts
    after it that come near: z[best] - z[e] <= 2 * jitter * max(|z[e]|, z[best])."""


@dataclass(frozen=True, slots=True)
class GroupedLinear(Op):
    """Product of each expert row with its expert's matrix: out[r] = W[ids of r] x[r] + b[ids of r].

    `x [T*k, in]` expert rows, `ids [T, k]`, `weight [E, out, in]`, `bias [E, out]`. With `gate` the
    weight is that of the gate: out = ActMul(x @ weight^T + bias, x @ up^T + up_bias).
    """

    x: Value
    ids: Value
    out: Value
    weight: Weight
    bias: Weight | None = None
    up: Weight | None = None
    up_bias: Weight | None = None
    gate: Gate | None = None
    """Gate, made by the pass `fold_expert_gates`."""
    activation: Activation | None = None
    """Function of the sums where there is no gate, set by the pass `fold_expert_gates`."""

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """The experts' weight, or those of gate and up."""
        return (self.weight,) if self.up is None else (self.weight, self.up)


@dataclass(frozen=True, slots=True)
class Combine(Op):
    """Weighted sum of a row's experts: out[t] = sum of weights[t, j] * x[t*k + j] over j = 0..k-1,
    in that order.
    """

    x: Value
    weights_value: Value
    out: Value


def check_choice(num_experts: int, top_k: int, *, num_groups: int, top_groups: int) -> None:
    """Checks that a row can choose `top_k` of `num_experts` experts, in `top_groups` of
    `num_groups` groups; UnsupportedModel where it cannot.
    """
    got = f"config.json: {num_experts} experts"
    if top_k > num_experts:
        raise UnsupportedModel(f"{got}, of which a row chooses {top_k}; allowed are {num_experts}")
    if num_experts % num_groups:
        raise UnsupportedModel(f"{got} in {num_groups} groups of different sizes")
    if top_groups > num_groups:
        raise UnsupportedModel(
            f"{got} in {num_groups} groups, of which a row chooses {top_groups}; allowed are"
            f" {num_groups}"
        )
    num_eligible = num_experts // num_groups * top_groups
    if top_k > num_eligible:
        raise UnsupportedModel(
            f"{got}, of which a row chooses {top_k} in {top_groups} of {num_groups} groups; these"
            f" have {num_eligible}"
        )
