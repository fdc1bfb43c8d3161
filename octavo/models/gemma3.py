"""Gemma 3 with images: SigLIP tower, average pooling per cell, and a decoder in which an image's
tokens attend to one another.

Gemma team 2025; Zhai et al. 2023 (SigLIP). Pan and scan (cropping an image several times) is not
supported; it is off by default in transformers.
"""

from __future__ import annotations

import math

from octavo.api.errors import UnsupportedModel
from octavo.models.gemma3_text import build_gemma3
from octavo.models.hf_config import HfConfig
from octavo.models.vision import ImageLayout, refuse_unread_vision, vision_config
from octavo.models.vit import Vit
from octavo.program.builder import Builder
from octavo.program.program import Program, Weight


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect("vision_config", "projector_hidden_act", "image_token_id")
    config.without_effect("boi_token_id", "eoi_token_id")
    decoder = build_gemma3(config, has_images=True)
    layout, hidden_size = image_layout(config), config.size("hidden_size")
    windows = [group.window for group in decoder["decoder"].groups if group.window is not None]
    num_tokens = config.integer("mm_tokens_per_image", 256, low=1)
    if any(window < num_tokens for window in windows):
        raise UnsupportedModel(
            f"config.json: mm_tokens_per_image is {num_tokens}, expected at most the"
            f" {min(windows)} keys of a sliding window"
        )
    vision = vision_config(config)
    tower = Vit.read(vision, "siglip_vision_model", "vision_tower.").build(None)
    projector = _projector(vision, layout, hidden_size)
    refuse_unread_vision(vision)
    return {**decoder, "vision": tower, "projector": projector}


def image_layout(config: HfConfig) -> ImageLayout:
    """Returns the image layout: fixed size, equal square cells."""
    vision = vision_config(config)
    side, patch_size = vision.size("image_size", 224), vision.size("patch_size", 16)
    tokens = config.integer("mm_tokens_per_image", 256, low=1)
    tokens_per_side, patches_per_side = math.isqrt(tokens), side // patch_size
    if tokens_per_side**2 != tokens or patches_per_side % tokens_per_side or side % patch_size:
        raise UnsupportedModel(
            f"config.json: mm_tokens_per_image is {tokens}, expected a square number that divides"
            f" {side} x {side} pixels in patches of {patch_size} x {patch_size}"
        )
    token_id = config.integer("image_token_index", 262_144)
    begin, end = (
        config.integer("boi_token_index", 255_999),
        config.integer("eoi_token_index", 256_000),
    )
    return ImageLayout(
        patch_size=patch_size,
        cell=patches_per_side // tokens_per_side,
        token_id=token_id,
        named_by=begin,
        written=("\n\n", begin, token_id, end, "\n\n"),
        is_whole=True,
        side=side,
    )


def _projector(vision: HfConfig, layout: ImageLayout, hidden_size: int) -> Program:
    """Returns the projector: cell mean, norm and matmul."""
    width = vision.size("hidden_size", 768)
    b = Builder("projector")
    x = b.pool_rows(b.input_rows(width), "mean")
    x = b.rms_norm(
        x,
        "multi_modal_projector.mm_soft_emb_norm",
        vision.number("layer_norm_eps", 1e-6),
        weight_offset=1.0,
    )
    name = "multi_modal_projector.mm_input_projection_weight"
    weight = Weight(name, (hidden_size, width), transposed=True)
    return b.finish(rows=b.linear_from(x, weight, name="projected"))
