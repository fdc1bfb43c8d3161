"""Nemotron and Minitron: LayerNorms with weight + 1, squared relu, RoPE on half of each head.
Parmar et al. 2024.
"""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    build_decoder,
    layer_norm,
    plan_cache,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import plain_mlp
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, norm_eps=1e-5, eps_name="norm_eps")
    cache = plan_cache(shape, (None,) * shape.num_layers)
    rope = rope_parameters(config, partial=0.5).table(shape.head_dim)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "relu2")
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        qkv_bias=bias,
        out_bias=bias,
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(
            b,
            x,
            f"model.layers.{i}.mlp",
            width,
            activation,
            names=("up_proj", "down_proj"),
            bias=mlp_bias,
        ),
        Frame(norm=layer_norm(shape.norm_eps, offset=1.0)),
    )
