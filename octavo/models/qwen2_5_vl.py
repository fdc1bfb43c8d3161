"""Qwen2.5-VL: Qwen2-VL with RMS norms, gated MLPs and mostly windowed attention in the tower. Bai
et al. 2025.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_mlp
from octavo.models.qwen2_vl import (
    EPS,
    build_text,
    get_patch_shape,
    merger,
    read_shape,
    turned_qkv,
)
from octavo.models.qwen2_vl import image_layout as unwindowed_layout
from octavo.models.vision import (
    IMAGE,
    WINDOW,
    ImageLayout,
    attend,
    finish_vision,
    get_axial_theta,
    patches,
    refuse_unread_vision,
    vision_config,
)
from octavo.program.builder import Builder
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    decoder = build_text(config)
    vision = vision_config(config)
    layout = image_layout(config)
    tower = _tower(vision)
    projector = merger(vision, layout, config.size("hidden_size"), centered=False)
    vision.without_effect("out_hidden_size", "tokens_per_second", "spatial_merge_size")
    vision.without_effect("window_size", "spatial_patch_size")
    refuse_unread_vision(vision)
    return {**decoder, "vision": tower, "projector": projector}


def image_layout(config: HfConfig) -> ImageLayout:
    """Returns Qwen2-VL's layout with windows."""
    layout, vision = unwindowed_layout(config), vision_config(config)
    pixels = vision.integer("window_size", 112, low=1)
    if pixels % layout.multiple:
        raise UnsupportedModel(
            f"config.json: window_size in vision_config is {pixels}, expected a multiple of"
            f" {layout.multiple} pixels"
        )
    per_second = vision.integer("tokens_per_second", 4, low=1)
    video = layout.video and replace(layout.video, positions_per_second=per_second)
    return replace(layout, window=pixels // layout.multiple, video=video)


def _tower(vision: HfConfig) -> Program:
    shape = read_shape(vision, width="hidden_size")
    width, activation = (
        vision.size("intermediate_size", 3420),
        vision.activation("hidden_act", "silu"),
    )
    over_all = vision.integers("fullatt_block_indexes") or (7, 15, 23, 31)
    rope = shape.axial_rope(get_axial_theta(vision))
    b = Builder("vision", shape.groups(IMAGE, WINDOW))
    x = patches(
        b, "visual.patch_embed.proj", shape.hidden_size, get_patch_shape(vision), bias=False
    )
    for i in range(shape.num_layers):
        layer = f"visual.blocks.{i}"
        normed = b.rms_norm(x, f"{layer}.norm1", EPS)
        qkv = turned_qkv(b, normed, layer, shape, rope)
        attended = attend(b, qkv, shape, i, IMAGE if i in over_all else WINDOW)
        x = b.add(x, b.linear(attended, f"{layer}.attn.proj", shape.hidden_size, bias=True))
        normed = b.rms_norm(x, f"{layer}.norm2", EPS)
        x = b.add(x, gated_mlp(b, normed, f"{layer}.mlp", width, activation, bias=True))
    return finish_vision(b, b.rms_norm(x, "visual.merger.ln_q", EPS))
