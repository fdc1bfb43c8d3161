"""Qwen3 MoE: Qwen3's attention, routed experts without a shared one. Qwen team 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, Sublayer
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.mlps import gated_mlp
from octavo.models.softmax_experts import SoftmaxExperts
from octavo.program.builder import Builder
from octavo.program.program import Program, Value


def build(config: HfConfig) -> dict[str, Program]:
    config = config.renamed(num_experts="num_local_experts")
    experts = SoftmaxExperts(
        num_experts=config.count("num_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.size("moe_intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        normalize=config.flag("norm_topk_prob", False),
    )
    shape = DecoderShape.read(config, num_kv_heads=4)
    config.without_effect("max_window_layers", "sliding_window")
    slides = config.flag("use_sliding_window", False)
    window = config.window(4096) if slides else None
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        shape=shape,
        windows=config.layer_windows(shape.num_layers, window, lambda i: True),
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        mlp=sparse_mlp(config, experts),
    )


def sparse_mlp(config: HfConfig, experts: SoftmaxExperts) -> Sublayer:
    """Returns the experts in every decoder_sparse_step-th layer, and dense MLPs in the others."""
    dense, dense_width = config.integers("mlp_only_layers"), config.size("intermediate_size")
    step = config.integer("decoder_sparse_step", 1, low=1)

    def append(b: Builder, x: Value, i: int) -> Value:
        name = f"model.layers.{i}.mlp"
        if i in dense or (i + 1) % step:
            return gated_mlp(b, x, name, dense_width, experts.activation)
        return experts(b, x, name)

    return append
