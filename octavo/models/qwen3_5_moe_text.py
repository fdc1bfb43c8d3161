"""Qwen3.5 MoE: Qwen3.5's mixers and attention, routed experts and a gated shared expert. Qwen team
2026.
"""

from __future__ import annotations

from octavo.models.hf_config import HfConfig
from octavo.models.qwen2_moe import shared_experts
from octavo.models.qwen3_5_text import build_qwen3_5
from octavo.program.program import Program


def build(config: HfConfig, *, has_images: bool = False) -> dict[str, Program]:
    # Every layer has experts, and their weights are normalized.
    config.without_effect("intermediate_size")
    defaults = {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    given = {name: config.values.get(name) or default for name, default in defaults.items()}
    experts = shared_experts(
        config.with_values(
            **given,
            norm_topk_prob=True,
            intermediate_size=1,
            mlp_only_layers=[],
            decoder_sparse_step=1,
        )
    )
    return build_qwen3_5(config, num_kv_heads=2, mlp=experts, has_images=has_images)
