"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one kv head. Li et al. 2023."""

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
from octavo.models.self_attention import SelfAttention, grouped_qkv, stacked_qkv
from octavo.program.program import Program

LAYERS = "transformer.h"


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("add_cross_attention", False)
    config.without_effect("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    config.without_effect(
        "inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"
    )
    config = config.renamed(
        hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head"
    )
    multi_query = config.flag("multi_query", True)
    kv_heads = 1 if multi_query else config.size("num_attention_heads")
    shape = DecoderShape.read(
        config.with_values(num_key_value_heads=kv_heads),
        norm_eps=1e-5,
        eps_name="layer_norm_epsilon",
        tied=True,
    )
    cache = plan_cache(shape, (None,) * shape.num_layers)
    width = config.size("n_inner", 4 * shape.hidden_size)
    activation = config.activation("activation_function", "gelu_pytorch_tanh")
    num_positions = config.integer("n_positions", low=1)
    project = stacked_qkv if multi_query else grouped_qkv
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(None,) * shape.num_layers,
        scale=shape.head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0,
        project=project(shape, "c_attn", bias=True),
        module="attn",
        out="c_proj",
        layers=LAYERS,
        out_bias=True,
    )
    return build_decoder(
        shape,
        cache.groups,
        attention,
        lambda b, x, i: plain_mlp(
            b, x, f"{LAYERS}.{i}.mlp", width, activation, names=("c_fc", "c_proj")
        ),
        Frame(
            norms=NormNames("ln_1", "ln_2"),
            norm=layer_norm(shape.norm_eps),
            embedding="transformer.wte",
            layers=LAYERS,
            final_norm="transformer.ln_f",
            positions=lambda b: b.position_embedding(
                "transformer.wpe", num_positions, shape.hidden_size
            ),
        ),
    )
