"""Falcon: multi-query or grouped attention parallel to the MLP, with RoPE or ALiBi. Almazrouei et
al. 2023.

Scores and ALiBi are both divided by sqrt(head_dim), as in its own code, without rounding ALiBi to
bfloat16.
"""

from __future__ import annotations

from octavo.models.alibi import alibi
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
from octavo.models.self_attention import SelfAttention, grouped_qkv, stacked_qkv
from octavo.program.program import Program

LAYERS = "transformer.h"


def build(config: HfConfig) -> dict[str, Program]:
    config = config.renamed(num_hidden_layers="n_layer", num_attention_heads="n_head")
    config = config.renamed(hidden_size="n_embed")
    # The model's generation determines which of these keys apply.
    config.without_effect("multi_query", "num_kv_heads", "num_ln_in_parallel_attn", "parallel_attn")
    config.without_effect("rope_parameters", "rope_scaling", "rope_theta", "rotary")
    shape, new = read_shape(config), config.flag("new_decoder_architecture", False)
    cache = plan_cache(shape, (None,) * shape.num_layers)
    bias, with_alibi = config.flag("bias", False), config.flag("alibi", False)
    rope = None if with_alibi else rope_parameters(config).table(shape.head_dim)
    grouped = new or not config.flag("multi_query", True)
    scale = shape.head_dim**-0.5
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope,) * shape.num_layers,
        scale=scale,
        project=(grouped_qkv if grouped else stacked_qkv)(shape, "query_key_value", bias=bias),
        module="self_attention",
        out="dense",
        layers=LAYERS,
        out_bias=bias,
        bias=alibi(shape.num_heads, factor=scale) if with_alibi else None,
    )
    width = config.size("ffn_hidden_size", 4 * shape.hidden_size)
    activation = config.activation("activation", "gelu")
    names = ("dense_h_to_4h", "dense_4h_to_h")
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(
            b, x, f"{LAYERS}.{i}.mlp", width, activation, names=names, bias=bias
        ),
        Frame(
            norms=get_norm_names(config, new),
            norm=layer_norm(shape.norm_eps),
            embedding="transformer.word_embeddings",
            layers=LAYERS,
            final_norm="transformer.ln_f",
            parallel=new or config.flag("parallel_attn", True),
        ),
    )


def read_shape(config: HfConfig) -> DecoderShape:
    num_heads = config.size("num_attention_heads")
    if config.flag("new_decoder_architecture", False):
        kv_heads = config.size("num_kv_heads", num_heads)
    else:
        kv_heads = 1 if config.flag("multi_query", True) else num_heads
    return DecoderShape.read(
        config.with_values(num_key_value_heads=kv_heads),
        norm_eps=1e-5,
        eps_name="layer_norm_epsilon",
        tied=True,
    )


def get_norm_names(config: HfConfig, new: bool) -> NormNames:
    """Returns the norm names: one or two parallel norms, or one before each sublayer."""
    if new and config.integer("num_ln_in_parallel_attn", 2) == 2:
        return NormNames("ln_attn", "ln_mlp")
    if new or config.flag("parallel_attn", True):
        return NormNames(before_mlp=None)
    return NormNames()
