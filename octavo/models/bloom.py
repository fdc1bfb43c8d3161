"""BLOOM: ALiBi instead of position embeddings, normed embeddings. BigScience 2022."""

from __future__ import annotations

from octavo.models.alibi import alibi
from octavo.models.decoder import (
    DecoderShape,
    Frame,
    build_decoder,
    layer_norm,
    plan_cache,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import plain_mlp
from octavo.models.self_attention import SelfAttention, grouped_qkv
from octavo.program.program import Program

LAYERS = "transformer.h"


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("apply_residual_connection_post_layernorm", False)
    config.without_effect(
        "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"
    )
    config.without_effect("n_inner", "offset_alibi", "skip_bias_add", "slow_but_exact")
    config = config.renamed(num_hidden_layers="n_layer", num_attention_heads="n_head")
    config = config.renamed(hidden_size="n_embed")
    shape = DecoderShape.read(config, norm_eps=1e-5, eps_name="layer_norm_epsilon", tied=True)
    cache = plan_cache(shape, (None,) * shape.num_layers)
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(None,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        project=grouped_qkv(shape, "query_key_value", bias=True),
        module="self_attention",
        out="dense",
        layers=LAYERS,
        out_bias=True,
        bias=alibi(shape.num_heads),
    )
    width, names = 4 * shape.hidden_size, ("dense_h_to_4h", "dense_4h_to_h")
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(b, x, f"{LAYERS}.{i}.mlp", width, "gelu_tanh", names=names),
        Frame(
            norm=layer_norm(shape.norm_eps),
            embedding="transformer.word_embeddings",
            embedding_norm="transformer.word_embeddings_layernorm",
            layers=LAYERS,
            final_norm="transformer.ln_f",
        ),
    )
