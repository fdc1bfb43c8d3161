"""StarCoder2: LayerNorms, a plain MLP, biases, a sliding window. Lozhkov et al. 2024."""

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
    shape = DecoderShape.read(
        config, num_kv_heads=2, norm_eps=1e-5, eps_name="norm_epsilon", tied=True
    )
    window = config.optional_integer("sliding_window")
    cache = plan_cache(shape, config.layer_windows(shape.num_layers, window, lambda i: True))
    bias = config.flag("use_bias", True)
    width = config.size("intermediate_size")
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope_parameters(config).table(shape.head_dim),) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        qkv_bias=bias,
        out_bias=bias,
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(
            b, x, f"model.layers.{i}.mlp", width, activation, names=("c_fc", "c_proj"), bias=bias
        ),
        Frame(norm=layer_norm(shape.norm_eps)),
    )
