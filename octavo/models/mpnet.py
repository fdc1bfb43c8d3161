"""MPNet: BERT with T5's relative positions in addition to absolute ones. Song et al. 2020."""

from __future__ import annotations

from octavo.models.encoder import (
    EncoderNames,
    EncoderShape,
    Positions,
    base_prefix,
    bert_mlp,
    build_encoder,
    roberta_classifier,
)
from octavo.models.hf_config import HfConfig
from octavo.program.ops import T5Bias
from octavo.program.program import Program, Weight

MAX_DISTANCE = 128
"""Distance from which on all positions share a bucket; not in the config."""

FIRST_POSITION = 2
"""Table row of position 0: the padding id is always 1."""


def build(config: HfConfig) -> dict[str, Program]:
    shape, prefix = EncoderShape.read(config), base_prefix(config, "mpnet")
    num_buckets = config.integer("relative_attention_num_buckets", 32, low=2)
    table = Weight(
        f"{prefix}encoder.relative_attention_bias.weight", (num_buckets, shape.num_heads)
    )
    return build_encoder(
        config,
        shape,
        names=EncoderNames(
            prefix=prefix,
            query="attention.attn.q",
            key="attention.attn.k",
            value="attention.attn.v",
            attention_out="attention.attn.o",
            attention_norm="attention.LayerNorm",
        ),
        positions=Positions(
            offset=FIRST_POSITION,
            num_rows=config.integer("max_position_embeddings", 512, low=1),
            bias=T5Bias(table, num_buckets, MAX_DISTANCE, bidirectional=True),
        ),
        mlp=bert_mlp(config),
        classifier=roberta_classifier,
    )
