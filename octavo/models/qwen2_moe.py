"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention, routed experts and one gated shared expert. Qwen
team 2024.
"""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Sublayer,
    build_decoder,
    plan_cache,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_mlp
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.models.softmax_experts import SoftmaxExperts
from octavo.program.builder import Builder
from octavo.program.program import Program, Value


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=16)
    cache = plan_cache(shape, alternating_windows(config, shape.num_layers))
    mlp = shared_experts(config)
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope_parameters(config).table(shape.head_dim),) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        qkv_bias=config.flag("qkv_bias", True),
    )
    return build_decoder(shape, cache.groups, attention, mlp)


def shared_experts(
    config: HfConfig, *, normalize: bool = False, layers: str = "model.layers"
) -> Sublayer:
    """Returns routed experts with a gated shared expert, and a plain MLP in some layers.

    `normalize` is the family's default of norm_topk_prob; `layers` is the module of the layers.
    """
    experts = SoftmaxExperts(
        num_experts=config.count("num_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.size("moe_intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        normalize=config.flag("norm_topk_prob", normalize),
    )
    activation, dense_width = experts.activation, config.size("intermediate_size")
    shared_width = config.size("shared_expert_intermediate_size")
    dense = set(config.integers("mlp_only_layers"))
    step = config.integer("decoder_sparse_step", 1, low=1)

    def mlp(b: Builder, x: Value, i: int) -> Value:
        name = f"{layers}.{i}.mlp"
        if i in dense or (i + 1) % step:
            return gated_mlp(b, x, name, dense_width, activation)
        chosen = experts(b, x, name)
        shared = gated_mlp(b, x, f"{name}.shared_expert", shared_width, activation)
        gate = b.act(b.linear(x, f"{name}.shared_expert_gate", 1), "sigmoid")
        return b.add(chosen, b.mul(shared, gate))

    return mlp


def alternating_windows(config: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Returns windows for every other layer below max_window_layers, if use_sliding_window
    is set.
    """
    window = config.window(4096) if config.flag("use_sliding_window", False) else None
    config.without_effect("sliding_window")
    last = config.integer("max_window_layers", 28)
    return config.layer_windows(num_layers, window, lambda i: i % 2 == 0 and i < last)
