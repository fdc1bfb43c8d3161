"""MiniMax-M2: attention with norms over all heads and partial RoPE, sigmoid-routed experts in every
layer. MiniMax 2025.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.mlps import gated_experts
from octavo.models.rope import rope_parameters
from octavo.program.builder import Builder
from octavo.program.program import Program, Value, Weight

DEFAULT_THETA = 5e6


def build(config: HfConfig) -> dict[str, Program]:
    config = config.renamed(num_experts="num_local_experts")
    config.refuse_unless("scoring_func", "sigmoid")
    config.refuse_unless("qk_norm_type", "per_layer")
    config.refuse_unless("use_qk_norm", True)
    config.refuse_unless("use_routing_bias", True)
    config.refuse_unless("shared_intermediate_size", 0)
    config.refuse_unless("attn_type_list", [1] * config.count("num_hidden_layers"))
    config.without_effect("router_jitter_noise", "mlp_intermediate_size", "layernorm_mlp_beta")
    config.without_effect("layernorm_full_attention_beta", "layernorm_linear_attention_beta")
    config.without_effect("num_mtp_modules", "mtp_transformer_layers", "use_mtp")
    shape = DecoderShape.read(config, num_kv_heads=8, head_dim=128)
    rotary_fraction = 1.0
    if config.values.get("rotary_dim") is not None and not config.table("rope_parameters"):
        rotary_fraction = config.size("rotary_dim") / shape.head_dim
    rope = rope_parameters(config, default_theta=DEFAULT_THETA, partial=rotary_fraction)
    num_experts, top_k = config.count("num_experts", 256), config.count("num_experts_per_tok", 8)
    width = config.size("intermediate_size", 1536)
    activation = config.activation("hidden_act", "silu")

    def mlp(b: Builder, x: Value, i: int) -> Value:
        name = f"model.layers.{i}.block_sparse_moe"
        routed = b.route(
            x,
            b.linear(x, f"{name}.gate", num_experts),
            top_k,
            score="sigmoid",
            bias=Weight(f"{name}.e_score_correction_bias", (num_experts,)),
            normalize=True,
        )
        return gated_experts(
            b,
            routed,
            f"{name}.experts",
            num_experts=num_experts,
            width=width,
            activation=activation,
            names=("w1", "w3", "w2"),
        )

    ropes = (rope.table(shape.head_dim),) * shape.num_layers
    return build_llama(config, shape=shape, ropes=ropes, row_norms=True, mlp=mlp)
