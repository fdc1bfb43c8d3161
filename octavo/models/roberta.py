"""RoBERTa: BERT with positions offset by the padding id. Liu et al. 2019."""

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
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    return build_encoder(
        config,
        EncoderShape.read(config),
        names=EncoderNames(prefix=base_prefix(config, "roberta")),
        positions=Positions(
            offset=config.integer("pad_token_id", 1, low=-1) + 1,
            num_rows=config.integer("max_position_embeddings", 512, low=1),
            num_segments=config.integer("type_vocab_size", 2),
        ),
        mlp=bert_mlp(config),
        classifier=roberta_classifier,
    )
