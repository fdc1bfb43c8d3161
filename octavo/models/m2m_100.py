"""M2M-100 and NLLB-200: pre-norm with a final norm per stack, sinusoidal positions. Fan et al.
2020.
"""

from __future__ import annotations

from octavo.models.hf_config import HfConfig
from octavo.models.seq2seq import Seq2SeqShape, Seq2SeqStyle, build_seq2seq, sinusoids
from octavo.program.program import Program, Sinusoids


def build(config: HfConfig) -> dict[str, Program]:
    activation = config.text("activation_function", "relu")
    scales = config.flag("scale_embedding", True)
    shape = Seq2SeqShape.read(
        config.with_values(activation_function=activation, scale_embedding=scales)
    )
    # The first row is the padding token's; positions are counted from the padding id.
    offset = config.integer("pad_token_id", 1) + 1
    frequencies = Sinusoids(shape.width / 2 - 1, in_single=True)
    style = Seq2SeqStyle(
        positions=sinusoids(shape, frequencies, offset=offset),
        norms_first=True,
        logits_bias=False,
    )
    return build_seq2seq(shape, style)
