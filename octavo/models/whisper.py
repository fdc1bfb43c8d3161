"""Whisper: an encoder of log-mel frames after two convolutions, and a text decoder. Radford et al.
2022.

The encoder has a row per second frame; `speech_encoder.py` describes its input rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.seq2seq import (
    HeadTaps,
    Seq2SeqShape,
    Seq2SeqStyle,
    build_decoder,
    finish_encoder,
    learned_positions,
)
from octavo.models.speech_encoder import convolve
from octavo.program.builder import Builder
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape, style = _read(config)
    encoder = _build_encoder(config, shape, style)
    return {"encoder": encoder, "decoder": build_decoder(shape, style)}


def build_alignment(config: HfConfig, heads: Sequence[tuple[int, int]]) -> dict[str, Program]:
    """Builds the Programs whose rows are the keys of the chosen cross-attention heads ("encoder"),
    and their queries ("decoder"). `heads` are pairs of a layer and a head; (): all heads of the
    second half of the layers, as in OpenAI's whisper.
    """
    shape, style = _read(config)
    stack = shape.decoder
    layers = range(stack.num_layers // 2, stack.num_layers)
    heads = heads or [(layer, head) for layer in layers for head in range(stack.num_heads)]
    for layer, head in heads:
        if not (0 <= layer < stack.num_layers and 0 <= head < stack.num_heads):
            raise UnsupportedModel(
                f"generation_config.json: alignment_heads has [{layer}, {head}], expected layers up"
                f" to {stack.num_layers - 1} and heads up to {stack.num_heads - 1}"
            )
    dim = shape.width // stack.num_heads
    return {
        "encoder": _build_encoder(config, shape, style, HeadTaps(heads, dim)),
        "decoder": build_decoder(shape, style, HeadTaps(heads, dim)),
    }


def _read(config: HfConfig) -> tuple[Seq2SeqShape, Seq2SeqStyle]:
    config.without_effect(
        *("use_weighted_layer_sum", "classifier_proj_size", "apply_spec_augment"),
        *("mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob"),
        *("mask_feature_length", "mask_feature_min_masks", "median_filter_width"),
        *("max_length", "suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids"),
    )
    shape = replace(
        Seq2SeqShape.read(config), num_positions=config.integer("max_target_positions", 448, low=1)
    )
    style = Seq2SeqStyle(
        positions=learned_positions(shape, offset=0),
        norms_first=True,
        k_bias=False,
        logits_bias=False,
        table="model.decoder.embed_tokens",
        head="proj_out",
    )
    return shape, style


def _build_encoder(
    config: HfConfig, shape: Seq2SeqShape, style: Seq2SeqStyle, taps: HeadTaps | None = None
) -> Program:
    num_bands = config.size("num_mel_bins", 80)
    num_positions = config.integer("max_source_positions", 1500, low=1)
    b, module = Builder("encoder", shape.groups, shape.vocab_size), "model.encoder"
    x = convolve(b, module, num_bands, shape.width)
    x = b.add(x, b.position_embedding(f"{module}.embed_positions", num_positions, shape.width))
    return finish_encoder(b, x, shape, style, taps)
