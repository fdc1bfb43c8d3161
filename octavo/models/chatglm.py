"""ChatGLM2 and ChatGLM3 in their original checkpoint format: multi-query attention, interleaved
RoPE on half of each head, modules under transformer.encoder. Du et al. 2022; Zeng et al. 2023.

The first ChatGLM, with two-dimensional positions, is not supported.
"""

from __future__ import annotations

from octavo.api.errors import UnsupportedModel
from octavo.models.decoder import (
    DecoderShape,
    Frame,
    build_decoder,
    layer_norm,
    plan_cache,
    rms_norm,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import stacked_gated_mlp
from octavo.models.rope import RopeParameters
from octavo.models.self_attention import SelfAttention, stacked_qkv
from octavo.program.builder import Builder
from octavo.program.program import Program, Value

LAYERS = "transformer.encoder.layers"


def build(config: HfConfig) -> dict[str, Program]:
    if "position_encoding_2d" in config.values or "inner_hidden_size" in config.values:
        raise UnsupportedModel(
            "config.json: ChatGLM-6B with two-dimensional positions is not supported",
            hint="use ChatGLM2, ChatGLM3 or GLM-4",
        )
    config.refuse_unless("apply_residual_connection_post_layernorm", False)
    config.refuse_unless("pre_seq_len")
    config.refuse_unless("post_layer_norm", True)
    config.refuse_unless("add_bias_linear", False)
    config.refuse_unless("quantization_bit", 0)
    config.refuse_unless("original_rope", True)
    config.without_effect("apply_query_key_layer_scaling", "attention_softmax_in_fp32")
    config.without_effect("bias_dropout_fusion", "fp32_residual_connection", "interleaved_qkv")
    shape = read_shape(config)
    cache = plan_cache(shape, (None,) * shape.num_layers)
    rope = RopeParameters(
        {},
        theta=10_000.0 * config.positive("rope_ratio", 1.0),
        max_positions=config.integer("seq_length", low=1),
        partial=0.5,
    ).table(shape.head_dim)
    width = config.size("ffn_hidden_size")
    make_norm = rms_norm if config.flag("rmsnorm", True) else layer_norm
    attention = SelfAttention(
        shape=shape,
        caches=cache.layers,
        ropes=(rope,) * shape.num_layers,
        scale=shape.head_dim**-0.5,
        project=stacked_qkv(
            shape,
            "query_key_value",
            bias=config.flag("add_qkv_bias", config.flag("add_bias_linear", False)),
        ),
        module="self_attention",
        out="dense",
        layers=LAYERS,
        rope_style="interleaved",
    )

    def mlp(b: Builder, x: Value, i: int) -> Value:
        names = ("dense_h_to_4h", "dense_4h_to_h")
        return stacked_gated_mlp(b, x, f"{LAYERS}.{i}.mlp", width, "silu", names=names)

    return build_decoder(
        shape,
        cache.groups,
        attention,
        mlp,
        Frame(
            norm=make_norm(shape.norm_eps),
            embedding="transformer.embedding.word_embeddings",
            layers=LAYERS,
            final_norm="transformer.encoder.final_layernorm",
            head="transformer.output_layer",
        ),
    )


def read_shape(config: HfConfig) -> DecoderShape:
    grouped = config.flag("multi_query_attention", False)
    heads = "multi_query_group_num" if grouped else "num_attention_heads"
    renamed = config.renamed(
        vocab_size="padded_vocab_size",
        num_hidden_layers="num_layers",
        head_dim="kv_channels",
        rms_norm_eps="layernorm_epsilon",
        num_key_value_heads=heads,
    )
    return DecoderShape.read(renamed, norm_eps=1e-5)
