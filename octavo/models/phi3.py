"""Phi-3 and Phi-4: Llama with q, k, v in one module and gate and up in another; long-context
variants use longrope. Abdin et al. 2024.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, build_decoder, plan_cache
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import stacked_gated_mlp
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention, stacked_qkv
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("full_attn_mod", 1)
    config.refuse_unless("interpolate_factor", 1)
    shape = DecoderShape.read(config, norm_eps=1e-5)
    window = config.optional_integer("sliding_window")
    cache = plan_cache(shape, config.layer_windows(shape.num_layers, window, lambda i: True))
    rope = rope_parameters(_with_longrope(config), partial=1.0).table(shape.head_dim)
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        project=stacked_qkv(shape, "qkv_proj"),
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: stacked_gated_mlp(b, x, f"model.layers.{i}.mlp", width, activation),
    )


def _with_longrope(config: HfConfig) -> HfConfig:
    """Normalizes longrope, which early files call su or yarn, and sets the original context, 4096
    by default.
    """
    given = config.table("rope_scaling") or config.table("rope_parameters")
    if (given.get("rope_type") or given.get("type")) in ("su", "yarn"):
        given = {**given, "rope_type": "longrope"}
    original = "original_max_position_embeddings"
    return config.with_values(
        rope_scaling=given, **{original: config.integer(original, 4096, low=1)}
    )
