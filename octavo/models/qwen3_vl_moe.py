"""Qwen3-VL MoE: Qwen3-VL's tower, and Qwen3's decoder with routed experts. Bai et al. 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.qwen3_moe import sparse_mlp
from octavo.models.qwen3_vl import build_qwen3_vl, image_layout
from octavo.models.softmax_experts import SoftmaxExperts
from octavo.program.program import Program

__all__ = ["build", "image_layout"]


def build(config: HfConfig) -> dict[str, Program]:
    config = config.renamed(num_experts="num_local_experts")
    config.without_effect("norm_topk_prob", "sliding_window")
    shape = DecoderShape.read(config, num_kv_heads=16)
    experts = SoftmaxExperts(
        num_experts=config.count("num_experts", 60),
        top_k=config.count("num_experts_per_tok", 4),
        width=config.size("moe_intermediate_size", 1408),
        activation=config.activation("hidden_act", "silu"),
        normalize=True,
        stacked=True,
    )
    return build_qwen3_vl(config, shape, sparse_mlp(config, experts))
