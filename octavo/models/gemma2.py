"""Gemma 2: norms before and after each sublayer, soft caps on scores and logits, a sliding window
in every other layer. Gemma team 2024.
"""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    build_decoder,
    plan_cache,
    rms_norm,
)
from octavo.models.gemma3_text import NORMS
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_mlp
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("use_bidirectional_attention", False)
    shape = DecoderShape.read(config, num_kv_heads=4, head_dim=256, tied=True)
    windows = config.layer_windows(shape.num_layers, config.window(4096), lambda i: i % 2 == 0)
    cache = plan_cache(shape, windows)
    bias = config.flag("attention_bias", False)
    width = config.size("intermediate_size")
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope_parameters(config).table(shape.head_dim),) * shape.num_layers,
        scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
        softcap=config.cap("attn_logit_softcapping", 50.0),
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: gated_mlp(b, x, f"model.layers.{i}.mlp", width, activation),
        Frame(
            norms=NORMS,
            norm=rms_norm(shape.norm_eps, offset=1.0),
            embedding_scale=shape.hidden_size**0.5,
            logit_softcap=config.cap("final_logit_softcapping", 30.0),
        ),
    )
