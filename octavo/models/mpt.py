"""MPT: ALiBi instead of position embeddings, LayerNorms without bias. MosaicML 2023."""

from __future__ import annotations

from octavo.models.alibi import interleaved_alibi
from octavo.models.config_keys import refuse_unread
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
from octavo.models.self_attention import SelfAttention, stacked_qkv
from octavo.program.program import Program

LAYERS = "transformer.blocks"


def build(config: HfConfig) -> dict[str, Program]:
    config = config.renamed(
        hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads"
    )
    config.refuse_unless("no_bias", True)
    config.refuse_unless("norm_type", "low_precision_layernorm", "layernorm")
    config.without_effect(
        "init_config", "init_device", "learned_pos_emb", "tokenizer_name", "verbose"
    )
    config.refuse_unless("logit_scale")
    config.refuse_unless("embedding_fraction", 1, 1.0)
    details = HfConfig(config.table("attn_config"))
    for name, allowed in (
        ("attn_type", "multihead_attention"),
        ("alibi", True),
        ("prefix_lm", False),
        ("qk_ln", False),
        ("rope", False),
    ):
        details.refuse_unless(name, allowed)
    shape = DecoderShape.read(config, norm_eps=1e-5, eps_name="layer_norm_epsilon", tied=True)
    cache = plan_cache(shape, (None,) * shape.num_layers)
    scale = details.optional_number("softmax_scale") or shape.head_dim**-0.5
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(None,) * shape.num_layers,
        scale=scale,
        project=stacked_qkv(shape, "Wqkv"),
        module="attn",
        out="out_proj",
        layers=LAYERS,
        clip=details.optional_positive("clip_qkv"),
        bias=interleaved_alibi(shape.num_heads, most=details.positive("alibi_bias_max", 8)),
    )
    details.without_effect("attn_impl", "kv_n_heads", "tie_word_embeddings")
    refuse_unread({**details.values, "model_type": "mpt's attn_config"}, details.values.asked)
    width = config.integer("expansion_ratio", 4, low=1) * shape.hidden_size
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(
            b, x, f"{LAYERS}.{i}.ffn", width, "gelu", names=("up_proj", "down_proj"), bias=False
        ),
        Frame(
            norms=NormNames("norm_1", "norm_2"),
            norm=layer_norm(shape.norm_eps, bias=False),
            embedding="transformer.wte",
            layers=LAYERS,
            final_norm="transformer.norm_f",
        ),
    )
