"""ELECTRA: BERT whose embeddings may be narrower than its layers. Clark et al. 2020."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

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
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape, width = EncoderShape.read(config), config.size("embedding_size", 128)
    return build_encoder(
        config,
        replace(shape, embedding_size=0 if width == shape.hidden_size else width),
        names=EncoderNames(prefix=base_prefix(config, "electra")),
        positions=Positions(
            num_rows=config.integer("max_position_embeddings", 512, low=1),
            num_segments=config.integer("type_vocab_size", 2),
        ),
        mlp=bert_mlp(config),
        classifier=partial(roberta_classifier, activation="gelu"),
    )
