"""Llama 2 and 3, SmolLM2, TinyLlama and whatever else says model_type llama. Touvron et al.
2023."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.models.decoder import DecoderShape, SelfAttention, build_decoder, gated_mlp, plan_cache
from octavo.models.hf_config import HfConfig
from octavo.models.rope import rope_parameters
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    num_layers = config.count("num_hidden_layers")
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        windows=(None,) * num_layers,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def build_llama(
    config: HfConfig,
    *,
    windows: Sequence[int | None],
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
    head_dim: int | None = None,
) -> dict[str, Program]:
    """Builds Llama's decoder, with the changes of Mistral, Qwen2 and Qwen3."""
    shape = DecoderShape.read(config, head_dim=head_dim)
    cache = plan_cache(shape, windows)
    rope = rope_parameters(config).table(shape.head_dim)
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "silu")
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        head_norms=head_norms,
    )
    return {
        "decoder": build_decoder(
            shape,
            cache.groups,
            attention,
            lambda b, x, i: gated_mlp(
                b, x, f"model.layers.{i}.mlp", width, activation, bias=mlp_bias
            ),
        )
    }
