"""ERNIE 4.5 MoE: interleaved RoPE, softmax routing with correction bias, shared experts. Baidu
2025.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, Frame
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.mlps import gated_experts, gated_mlp
from octavo.program.builder import Builder
from octavo.program.program import Program, Value, Weight

DEFAULT_THETA = 500_000.0
LEAST_SUM = 1e-9
"""Smallest plausible sum of routing weights; a moe_norm_min below it has no effect."""


def build(config: HfConfig) -> dict[str, Program]:
    config = config.renamed(num_experts="moe_num_experts", num_experts_per_tok="moe_k")
    if config.number("moe_norm_min", 1e-12) > LEAST_SUM:
        config.refuse_unless("moe_norm_min", 1e-12)
    shape = DecoderShape.read(config, num_kv_heads=4, norm_eps=1e-5, tied=True)
    num_experts, top_k = config.count("num_experts", 64), config.count("num_experts_per_tok", 6)
    width, dense_width = config.size("moe_intermediate_size"), config.size("intermediate_size")
    shared = config.integer("moe_num_shared_experts", 2)
    activation, bias = config.activation("hidden_act", "silu"), config.flag("use_bias", False)
    is_routed = routed_layers(config, shape.num_layers)

    def mlp(b: Builder, x: Value, i: int) -> Value:
        name = f"model.layers.{i}.mlp"
        if i not in is_routed:
            return gated_mlp(b, x, name, dense_width, activation, bias=bias)
        logits = b.linear(x, f"{name}.gate", num_experts)
        correction = Weight(f"{name}.moe_statics.e_score_correction_bias", (1, num_experts))
        routed = b.route(x, logits, top_k, bias=correction, normalize=True)
        chosen = gated_experts(
            b,
            routed,
            f"{name}.experts",
            num_experts=num_experts,
            width=width,
            activation=activation,
        )
        if not shared:
            return chosen
        name = f"{name}.shared_experts"
        return b.add(chosen, gated_mlp(b, x, name, shared * width, activation, bias=bias))

    return build_llama(
        config,
        shape=shape,
        theta=DEFAULT_THETA,
        interleaved=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp=mlp,
        frame=Frame(head_bias=bias),
    )


def routed_layers(config: HfConfig, num_layers: int) -> range:
    """Returns the layers with experts: every `moe_layer_interval`-th in a range."""
    interval = config.integer("moe_layer_interval", 1, low=1)
    first = config.integer("moe_layer_start_index", 1)
    last = config.values.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last in (None, -1) else config.integer("moe_layer_end_index")
    begin = -(-(first + 1) // interval) * interval - 1
    return range(begin, min(last, num_layers - 1) + 1, interval)
