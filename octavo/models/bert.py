"""BERT. Devlin et al. 2019."""

from __future__ import annotations

from octavo.models.encoder import (
    EncoderNames,
    EncoderShape,
    Positions,
    base_prefix,
    bert_classifier,
    bert_mlp,
    build_encoder,
)
from octavo.models.hf_config import HfConfig
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape, prefix = EncoderShape.read(config), base_prefix(config, "bert")
    return build_encoder(
        config,
        shape,
        names=EncoderNames(prefix=prefix),
        positions=Positions(
            num_rows=config.integer("max_position_embeddings", 512, low=1),
            num_segments=config.integer("type_vocab_size", 2),
        ),
        mlp=bert_mlp(config),
        classifier=bert_classifier(f"{prefix}pooler.dense"),
    )
