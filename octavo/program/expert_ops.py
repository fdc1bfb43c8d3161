"""Ops of mixture-of-experts layers: routing, expert matmuls and the weighted sum.

Shapes use the alphabet of `ops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.api.errors import UnsupportedModel
from octavo.program.ops import Activation, Gate
from octavo.program.program import Op, Value, Weight

Score = Literal["softmax", "sigmoid", "softmax_top_k", "sigmoid_top_k", "sparsemixer"]
"""Formula that turns router logits into expert weights."""


GroupRank = Literal["two_best", "best"]
"""Ranking of expert groups: by the sum of their two best scores, or by their best score."""


@dataclass(frozen=True, slots=True)
class Route(Op):
    """Chooses `top_k` experts for each row and repeats the row for each of them.

    `x [T, W]`, `logits [T, E]`; returns (rows [T*k, W] on the axis expert_rows in the order t*k +
    j, ids [T, k] int, weights [T, k]). `score`: softmax or sigmoid over all experts;
    `softmax_top_k` or `sigmoid_top_k` over the chosen logits only, with experts chosen by logits;
    or `sparsemixer` (see `jitter`). Experts are chosen by score plus `bias [E]` (DeepSeek-V3),
    within the best `top_groups` of `num_groups` expert groups, ranked by `group_rank`. Weights are
    the scores without the bias, divided by their sum if `normalize`, times `scale` and times
    `factors [E]` (Gemma 4). Ties go to the lower id.
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
    """Whether rows are multiplied by their weights, which then become 1 (Llama 4)."""
    jitter: float = 0.0
    """Margin of `sparsemixer`: an expert's weight is its softmax over itself and the later experts
    with z[best] - z[e] <= 2 * jitter * max(|z[e]|, z[best])."""
    factors: Weight | None = None
    """A factor per expert; None: 1."""


@dataclass(frozen=True, slots=True)
class GroupedLinear(Op):
    """Matmul of each expert row with its expert's matrix: out[r] = W[ids of r] x[r] + b[ids of r].

    `x [T*k, in]` expert rows, `ids [T, k]`, `weight [E, out, in]`, `bias [E, out]`. With `gate`,
    `weight` belongs to the gate: out = ActMul(x @ weight^T + bias, x @ up^T + up_bias).
    """

    x: Value
    ids: Value
    out: Value
    weight: Weight
    bias: Weight | None = None
    up: Weight | None = None
    up_bias: Weight | None = None
    gate: Gate | None = None
    """Gate, set by the pass `fold_expert_gates`."""
    activation: Activation | None = None
    """Activation without a gate, set by the pass `fold_expert_gates`."""

    @property
    def matrices(self) -> tuple[Weight, ...]:
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
    """Raises UnsupportedModel unless a row can choose `top_k` of `num_experts` experts within
    `top_groups` of `num_groups` groups.
    """
    given_count = f"config.json: {num_experts} experts"
    if top_k > num_experts:
        raise UnsupportedModel(
            f"{given_count}, with top-{top_k} routing; expected at most {num_experts}"
        )
    if num_experts % num_groups:
        raise UnsupportedModel(f"{given_count} in {num_groups} groups of different sizes")
    if top_groups > num_groups:
        raise UnsupportedModel(
            f"{given_count} in {num_groups} groups, with {top_groups} groups per token; expected"
            f" at most {num_groups}"
        )
    num_eligible = num_experts // num_groups * top_groups
    if top_k > num_eligible:
        raise UnsupportedModel(
            f"{given_count}, with top-{top_k} routing in {top_groups} of {num_groups} groups; these"
            f" have {num_eligible}"
        )
