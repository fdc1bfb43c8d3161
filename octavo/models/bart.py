"""BART: post-norm, normed embeddings, learned positions. Lewis et al. 2020."""

from __future__ import annotations

from octavo.models.hf_config import HfConfig
from octavo.models.seq2seq import Seq2SeqShape, Seq2SeqStyle, build_seq2seq, learned_positions
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("normalize_before", False)
    config.refuse_unless("add_final_layer_norm", False)
    shape = Seq2SeqShape.read(config)
    style = Seq2SeqStyle(positions=learned_positions(shape), norms_embeddings=True)
    return build_seq2seq(shape, style)
