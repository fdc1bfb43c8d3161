"""Whisper's encoder of log-mel frames, a part of speech models and of decoders that read audio.

An input row contains the frames that both convolutions cover: three runs of three frames. A run is
followed by a 1 (for the bias) if its middle frame is part of the audio; otherwise the run is all
zeros. Radford et al. 2022.
"""

from __future__ import annotations

from octavo.models.mlps import plain_mlp
from octavo.models.vision import VisionShape, attend
from octavo.program.builder import Builder
from octavo.program.ops import Activation
from octavo.program.program import TAPS, Value, Weight

EPS = 1e-5


def convolve(b: Builder, module: str, num_bands: int, width: int) -> Value:
    """Appends two convolutions over the input rows, the second of which skips every other frame,
    `[T, width]`.
    """
    run = TAPS * num_bands + 1
    rows = b.input_rows(TAPS * run)
    sources = (f"{module}.conv1.weight", f"{module}.conv1.bias")
    x: Value | None = None
    for tap in range(TAPS):
        name = f"{module}.conv1.{tap}"
        first = Weight(name, (width, TAPS * run), sources, stored_as="run", tap=tap)
        frame = b.act(b.linear_from(rows, first, name="frame"), "gelu")
        second = Weight(
            f"{module}.conv2.{tap}",
            (width, width),
            (f"{module}.conv2.weight",),
            stored_as="tap",
            tap=tap,
        )
        bias = Weight(f"{module}.conv2.bias", (width,)) if tap == 0 else None
        part = b.linear_from(frame, second, bias, name="convolved")
        x = part if x is None else b.add(x, part)
    assert x is not None, "a convolution has taps"
    return b.act(x, "gelu")


def append_layer(
    b: Builder,
    x: Value,
    module: str,
    shape: VisionShape,
    i: int,
    *,
    group: str,
    mlp_width: int,
    activation: Activation,
) -> Value:
    """Appends layer i; its attention reads all keys of the group."""
    layer = f"{module}.layers.{i}"
    normed = b.layer_norm(x, f"{layer}.self_attn_layer_norm", EPS)
    q, k, v = (
        b.linear(normed, f"{layer}.self_attn.{part}_proj", x.width, bias=part != "k")
        for part in "qkv"
    )
    attended = attend(b, (q, k, v), shape, i, group)
    x = b.add(x, b.linear(attended, f"{layer}.self_attn.out_proj", x.width, bias=True))
    normed = b.layer_norm(x, f"{layer}.final_layer_norm", EPS)
    return b.add(x, plain_mlp(b, normed, layer, mlp_width, activation))
