"""Gemma 3's decoder: norms before and after each sublayer, head norms, sliding-window layers with
their own RoPE table.

Gemma team 2025. `attn_logit_softcapping` is rejected: transformers has the option but ignores it.
"""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    NormNames,
    build_decoder,
    plan_cache,
    rms_norm,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_mlp
from octavo.models.rope import tables_by_layer_type
from octavo.models.self_attention import SelfAttention
from octavo.program.program import Program

NORMS = NormNames(
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)


def build(config: HfConfig) -> dict[str, Program]:
    return build_gemma3(config)


def build_gemma3(config: HfConfig, *, has_images: bool = False) -> dict[str, Program]:
    """Builds the decoder; with `has_images` it accepts image rows, which attend to one another."""
    config.refuse_unless("attn_logit_softcapping")
    config.without_effect("hidden_act")  # hidden_activation takes precedence
    config.refuse_unless("use_bidirectional_attention", False)
    shape = DecoderShape.read(config, num_kv_heads=4, head_dim=256, tied=True)
    pattern = config.integer(
        "sliding_window_pattern", config.integer("_sliding_window_pattern", 6), low=1
    )
    windows = config.layer_windows(
        shape.num_layers, config.window(4096), lambda i: (i + 1) % pattern != 0
    )
    cache = plan_cache(shape, windows)
    sliding, full = tables_by_layer_type(
        config.with_values(
            max_position_embeddings=config.integer("max_position_embeddings", 131_072)
        ),
        shape.head_dim,
        sliding_theta=config.number("rope_local_base_freq", 10_000.0),
        full_theta=config.number("rope_theta", 1_000_000.0),
    )
    bias = config.flag("attention_bias", False)
    width, activation = (
        config.size("intermediate_size"),
        config.activation("hidden_activation", "gelu_pytorch_tanh"),
    )
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=[full if window is None else sliding for window in windows],
        scale=config.positive("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        norm_offset=1.0,
        sees_ahead=has_images,
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
            takes_rows=has_images,
            logit_softcap=config.optional_number("final_logit_softcapping"),
        ),
    )
