"""LFM2 MoE: LFM2's convolutions and attention, sigmoid-routed experts after the first layers.
Liquid AI 2025.

transformers adds 1e-6 to the sum by which routing weights are divided; here it is left out.
"""

from __future__ import annotations

from octavo.models.hf_config import HfConfig
from octavo.models.lfm2 import build_lfm2, feed_forward
from octavo.models.mlps import gated_experts
from octavo.program.builder import Builder
from octavo.program.program import Program, Value, Weight


def build(config: HfConfig) -> dict[str, Program]:
    num_experts, top_k = config.count("num_experts", 32), config.count("num_experts_per_tok", 4)
    width = config.size("moe_intermediate_size", 1792)
    dense_width = config.size("intermediate_size", 7168)
    num_dense = config.integer("num_dense_layers", 2)
    normalize = config.flag("norm_topk_prob", True)
    scale = config.number("routed_scaling_factor", 1.0)
    has_bias = config.flag("use_expert_bias", True)

    def mlp(b: Builder, x: Value, i: int) -> Value:
        if i < num_dense:
            return feed_forward(b, x, i, dense_width)
        name = f"model.layers.{i}.feed_forward"
        routed = b.route(
            x,
            b.linear(x, f"{name}.gate", num_experts),
            top_k,
            score="sigmoid",
            bias=Weight(f"{name}.expert_bias", (num_experts,)) if has_bias else None,
            normalize=normalize,
            scale=scale,
        )
        return gated_experts(
            b,
            routed,
            f"{name}.experts",
            num_experts=num_experts,
            width=width,
            activation="silu",
            names=("w1", "w3", "w2"),
        )

    return build_lfm2(config, mlp)
