"""ALBERT: BERT with narrow embeddings, whose layers share their weights within groups. Lan et al.
2020.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.models.encoder import (
    EncoderNames,
    EncoderShape,
    Positions,
    base_prefix,
    bert_classifier,
    build_encoder,
)
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import plain_mlp
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape, prefix = EncoderShape.read(config), base_prefix(config, "albert")
    config.without_effect("down_scale_factor", "gap_size", "net_structure_type")
    config.without_effect("num_memory_blocks", "layers_to_keep")
    num_groups = config.count("num_hidden_groups", 1)
    num_inner = config.count("inner_group_num", 1)
    modules = tuple(
        f"encoder.albert_layer_groups.{i * num_groups // shape.num_layers}.albert_layers.{j}"
        for i in range(shape.num_layers)
        for j in range(num_inner)
    )
    width = config.size("intermediate_size")
    activation = config.activation("hidden_act", "gelu_new")
    return build_encoder(
        config,
        replace(
            shape,
            num_layers=len(modules),
            embedding_size=config.size("embedding_size", 128),
        ),
        names=EncoderNames(
            prefix=prefix,
            shared_layers=modules,
            query="attention.query",
            key="attention.key",
            value="attention.value",
            attention_out="attention.dense",
            attention_norm="attention.LayerNorm",
            mlp_norm="full_layer_layer_norm",
            projection="encoder.embedding_hidden_mapping_in",
        ),
        positions=Positions(
            num_rows=config.integer("max_position_embeddings", 512, low=1),
            num_segments=config.integer("type_vocab_size", 2),
        ),
        mlp=lambda b, x, layer: plain_mlp(
            b, x, layer, width, activation, names=("ffn", "ffn_output")
        ),
        classifier=bert_classifier(f"{prefix}pooler"),
    )
