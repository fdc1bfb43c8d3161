"""Qwen3.5 MoE: Qwen3.5's mixers and attention, routed experts and a gated shared expert. Qwen team
2026.
"""

from __future__ import annotations

from octavo.models.decoder import PredictionLayer, Sublayer
from octavo.models.hf_config import HfConfig
from octavo.models.qwen2_moe import shared_experts
from octavo.models.qwen3_5_text import build_qwen3_5, build_qwen3_5_prediction_layer
from octavo.program.program import Program

NUM_KV_HEADS = 2
"""Default of num_key_value_heads."""


def build(config: HfConfig, *, has_images: bool = False) -> dict[str, Program]:
    # Every layer has experts, and their weights are normalized.
    config.without_effect("intermediate_size")
    return build_qwen3_5(config, NUM_KV_HEADS, _experts, has_images=has_images)


def prediction_layer(config: HfConfig, *, has_images: bool = False) -> PredictionLayer:
    """Returns the multi-token-prediction layer."""
    return build_qwen3_5_prediction_layer(config, NUM_KV_HEADS, _experts, has_images=has_images)


def _experts(config: HfConfig, layers: str) -> Sublayer:
    defaults = {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    given = {name: config.values.get(name) or default for name, default in defaults.items()}
    return shared_experts(
        config.with_values(
            **given,
            norm_topk_prob=True,
            intermediate_size=1,
            mlp_only_layers=[],
            decoder_sparse_step=1,
        ),
        layers=layers,
    )
