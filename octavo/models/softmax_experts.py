"""Softmax-routed experts: the MLP of Mixtral and relatives.

Shazeer et al. 2017; Jiang et al. 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.mlps import gated_experts, stacked_experts
from octavo.program.builder import Builder
from octavo.program.ops import Activation
from octavo.program.program import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxExperts:
    num_experts: int
    top_k: int
    width: int
    """Inner size of an expert."""
    activation: Activation
    normalize: bool
    """Whether a row's expert weights are normalized to sum to 1."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Module names of an expert's projections."""
    stacked: bool = False
    """Whether checkpoints stack all experts in two input-major tensors."""

    def __call__(self, b: Builder, x: Value, name: str) -> Value:
        """Appends the MLP of the named module."""
        logits = b.linear(x, f"{name}.gate", self.num_experts)
        routed = b.route(x, logits, self.top_k, normalize=self.normalize)
        if self.stacked:
            return stacked_experts(
                b,
                routed,
                f"{name}.experts",
                num_experts=self.num_experts,
                width=self.width,
                activation=self.activation,
            )
        return gated_experts(
            b,
            routed,
            f"{name}.experts",
            num_experts=self.num_experts,
            width=self.width,
            activation=self.activation,
            names=self.names,
        )
