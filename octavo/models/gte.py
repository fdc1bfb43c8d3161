"""GTE: BERT with RoPE and gated MLPs, as `gte` of transformers and as `new` of its own release.
Zhang et al. 2024.
"""

from __future__ import annotations

from octavo.models.encoder import (
    EncoderNames,
    EncoderShape,
    Positions,
    base_prefix,
    bert_classifier,
    build_encoder,
)
from octavo.models.hf_config import HfConfig
from octavo.models.matrix_rows import Rows, linear_part
from octavo.models.rope import DEFAULT_THETA, rope_parameters
from octavo.program.builder import Builder
from octavo.program.program import Program, Value

THETAS = {"gte": 160_000.0, "new": DEFAULT_THETA}
"""Default base of RoPE by model type."""


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("position_embedding_type", "rope")
    config.refuse_unless("layer_norm_type", "layer_norm")
    config.refuse_unless("logn_attention_scale", False)
    config.without_effect("logn_attention_clip1", "pack_qkv", "unpad_inputs")
    config.without_effect("use_memory_efficient_attention")
    shape = EncoderShape.read(config.with_values(position_embedding_type=None))
    config.refuse_unless("head_dim", shape.head_dim)
    theta, prefix = THETAS[config.model_type], base_prefix(config, config.model_type)
    width, activation = config.size("intermediate_size"), config.activation("hidden_act", "gelu")

    def mlp(b: Builder, x: Value, layer: str) -> Value:
        up, gate = (
            linear_part(b, x, f"{layer}.mlp.up_gate_proj", Rows(width, 2 * width, start))
            for start in (0, width)
        )
        inner = b.act_mul(gate, up, activation)
        return b.linear(inner, f"{layer}.mlp.down_proj", x.width, bias=True)

    return build_encoder(
        config,
        shape,
        names=EncoderNames(
            prefix=prefix,
            stacked="attention.qkv_proj",
            attention_out="attention.o_proj",
            attention_norm="attn_ln",
            mlp_norm="mlp_ln",
        ),
        positions=Positions(
            offset=None,
            num_segments=config.integer("type_vocab_size", 1),
            rope=rope_parameters(config, default_theta=theta).table(shape.head_dim),
        ),
        mlp=mlp,
        classifier=bert_classifier(f"{prefix}pooler.dense"),
    )
