"""Phi-1, 1.5 and 2: parallel attention and MLP after one LayerNorm, partial RoPE. Li et al.
2023.
"""

from __future__ import annotations

from octavo.models.decoder import (
    DecoderShape,
    Frame,
    NormNames,
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
    shape = DecoderShape.read(config, norm_eps=1e-5, eps_name="layer_norm_eps")
    cache = plan_cache(shape, (None,) * shape.num_layers)
    rope = rope_parameters(config, partial=0.5).table(shape.head_dim)
    width = config.size("intermediate_size")
    activation = config.activation("hidden_act", "gelu_new")
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        out="dense",
        qkv_bias=True,
        out_bias=True,
        own_norms="shared" if config.flag("qk_layernorm", False) else "",
        norm_names=("q_layernorm", "k_layernorm"),
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(b, x, f"model.layers.{i}.mlp", width, activation),
        Frame(
            norms=NormNames(before_mlp=None),
            norm=layer_norm(shape.norm_eps),
            final_norm="model.final_layernorm",
            head_bias=True,
            parallel=True,
        ),
    )
