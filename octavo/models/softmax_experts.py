"""Routed experts that a softmax over all of them chooses: the MLP of Mixtral and its line.

Owns the names and sizes of one such MLP. Knows no layer, and nothing of experts that every row
goes through. Shazeer et al. 2017; Jiang et al. 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.mlps import gated_experts
from octavo.program.builder import Builder
from octavo.program.ops import Activation
from octavo.program.program import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxExperts:
    num_experts: int
    top_k: int
    width: int
    """Columns inside an expert."""
    activation: Activation
    normalize: bool
    """Whether the weights of a row's experts are divided by their sum."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Module names of an expert's products."""

    def __call__(self, b: Builder, x: Value, name: str) -> Value:
        """Appends the MLP of the named module to the Program."""
        logits = b.linear(x, f"{name}.gate", self.num_experts)
        return gated_experts(
            b,
            b.route(x, logits, self.top_k, normalize=self.normalize),
            f"{name}.experts",
            num_experts=self.num_experts,
            width=self.width,
            activation=self.activation,
            names=self.names,
        )
