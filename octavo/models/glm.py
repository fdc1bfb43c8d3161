"""GLM-4-9B and GLM-Edge: interleaved RoPE on half of each head, gate and up in one module. GLM team
2024.
"""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    NormNames,
    build_decoder,
    plan_cache,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import stacked_gated_mlp
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    return build_glm(config, NormNames())


def build_glm(config: HfConfig, norms: NormNames) -> dict[str, Program]:
    """Builds the decoder of GLM, or of GLM-4-0414 with additional norms."""
    shape = DecoderShape.read(config, num_kv_heads=2, head_dim=128, norm_eps=1.5625e-07)
    cache = plan_cache(shape, (None,) * shape.num_layers)
    rope = rope_parameters(config, partial=0.5).table(shape.head_dim)
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        rope_style="interleaved",
        qkv_bias=config.flag("attention_bias", True),
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: stacked_gated_mlp(b, x, f"model.layers.{i}.mlp", width, activation),
        Frame(norms=norms),
    )
