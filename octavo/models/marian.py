"""Marian: post-norm, sinusoidal positions. Junczys-Dowmunt et al. 2018."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.hf_config import HfConfig
from octavo.models.seq2seq import Seq2SeqShape, Seq2SeqStyle, build_seq2seq, sinusoids
from octavo.program.program import Program, Sinusoids


def build(config: HfConfig) -> dict[str, Program]:
    config.refuse_unless("decoder_vocab_size", config.integer("vocab_size", low=1))
    shape = Seq2SeqShape.read(config)
    if not config.flag("share_encoder_decoder_embeddings", True):
        shape = replace(shape, ties_tables=False)
    style = Seq2SeqStyle(positions=sinusoids(shape, Sinusoids(shape.width / 2)))
    return build_seq2seq(shape, style)
