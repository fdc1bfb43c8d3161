"""Whisper: an encoder of log-mel frames after two convolutions, and a text decoder. Radford et al.
2022.

The encoder has a row per second frame. Its input row contains the frames that the convolutions
cover: three runs of three frames. A run is followed by a 1 (for the bias) if its middle frame is
part of the audio; otherwise the run is all zeros.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.models.hf_config import HfConfig
from octavo.models.seq2seq import (
    Seq2SeqShape,
    Seq2SeqStyle,
    build_decoder,
    finish_encoder,
    learned_positions,
)
from octavo.program.builder import Builder
from octavo.program.program import TAPS, Program, Value, Weight


def build(config: HfConfig) -> dict[str, Program]:
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
    return {
        "encoder": _build_encoder(
            shape,
            style,
            num_bands=config.size("num_mel_bins", 80),
            num_positions=config.integer("max_source_positions", 1500, low=1),
        ),
        "decoder": build_decoder(shape, style),
    }


def _build_encoder(
    shape: Seq2SeqShape, style: Seq2SeqStyle, *, num_bands: int, num_positions: int
) -> Program:
    b = Builder("encoder", shape.groups, shape.vocab_size)
    module, run = "model.encoder", TAPS * num_bands + 1
    rows = b.given_rows(TAPS * run)
    name, whole = f"{module}.conv1", (shape.width, TAPS * run)
    sources = (f"{name}.weight", f"{name}.bias")
    x: Value | None = None
    for tap in range(TAPS):
        first = Weight(f"{name}.{tap}", whole, sources, stored_as="run", tap=tap)
        frame = b.act(b.linear_from(rows, first, name="frame"), "gelu")
        second = Weight(
            f"{module}.conv2.{tap}",
            (shape.width, shape.width),
            (f"{module}.conv2.weight",),
            stored_as="tap",
            tap=tap,
        )
        bias = Weight(f"{module}.conv2.bias", (shape.width,)) if tap == 0 else None
        part = b.linear_from(frame, second, bias, name="convolved")
        x = part if x is None else b.add(x, part)
    assert x is not None, "a convolution has taps"
    x = b.act(x, "gelu")
    x = b.add(x, b.position_embedding(f"{module}.embed_positions", num_positions, shape.width))
    return finish_encoder(b, x, shape, style)
