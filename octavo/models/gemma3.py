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
from octavo.models.vision import (
    IMAGE,
    ImageLayout,
    VisionShape,
    attend,
    finish_vision,
    patches,
    refuse_unread_vision,
    vision_config,
)
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
    tower = _tower(vision)
    projector = _projector(vision, layout, hidden_size)
    refuse_unread_vision(vision)
    return {**decoder, "vision": tower, "projector": projector}


def image_layout(config: HfConfig) -> ImageLayout:
    """Returns the image layout: fixed size, equal square cells."""
    vision = vision_config(config)
    side, patch_size = vision.size("image_size", 224), vision.size("patch_size", 16)
    tokens = config.integer("mm_tokens_per_image", 256, low=1)
    tokens_a_side, patches_a_side = math.isqrt(tokens), side // patch_size
    if tokens_a_side**2 != tokens or patches_a_side % tokens_a_side or side % patch_size:
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
        cell=patches_a_side // tokens_a_side,
        token_id=token_id,
        named_by=begin,
        written=("\n\n", begin, token_id, end, "\n\n"),
        is_whole=True,
        side=side,
    )


def _tower(vision: HfConfig) -> Program:
    shape = VisionShape(
        hidden_size=vision.size("hidden_size", 768),
        num_layers=vision.count("num_hidden_layers", 12),
        num_heads=vision.size("num_attention_heads", 12),
    )
    shape.check()
    patch_size, eps = vision.size("patch_size", 16), vision.number("layer_norm_eps", 1e-6)
    width = vision.size("intermediate_size", 3072)
    activation = vision.activation("hidden_act", "gelu_pytorch_tanh")
    vision.without_effect("vision_use_head")
    num_patches = (vision.size("image_size", 224) // patch_size) ** 2
    kernel = (vision.size("num_channels", 3), patch_size, patch_size)
    b = Builder("vision", shape.groups(IMAGE))
    name = "vision_tower.embeddings"
    x = patches(b, f"{name}.patch_embedding", shape.hidden_size, kernel, bias=True)
    at = b.position_embedding(f"{name}.position_embedding", num_patches, shape.hidden_size)
    x = b.add(x, at)
    for i in range(shape.num_layers):
        layer = f"vision_tower.encoder.layers.{i}"
        normed = b.layer_norm(x, f"{layer}.layer_norm1", eps)
        q, k, v = (
            b.linear(normed, f"{layer}.self_attn.{part}_proj", shape.hidden_size, bias=True)
            for part in "qkv"
        )
        attended = attend(b, (q, k, v), shape, i)
        x = b.add(
            x, b.linear(attended, f"{layer}.self_attn.out_proj", shape.hidden_size, bias=True)
        )
        inner = b.linear(b.layer_norm(x, f"{layer}.layer_norm2", eps), f"{layer}.mlp.fc1", width,
                         bias=True)  # fmt: skip
        made = b.linear(b.act(inner, activation), f"{layer}.mlp.fc2", shape.hidden_size, bias=True)
        x = b.add(x, made)
    return finish_vision(b, b.layer_norm(x, "vision_tower.post_layernorm", eps))


def _projector(vision: HfConfig, layout: ImageLayout, hidden_size: int) -> Program:
    """Returns the projector: cell mean, norm and matmul."""
    width = vision.size("hidden_size", 768)
    b = Builder("projector")
    x = b.pool_rows(b.given_rows(width), "mean")
    x = b.rms_norm(
        x,
        "multi_modal_projector.mm_soft_emb_norm",
        vision.number("layer_norm_eps", 1e-6),
        weight_offset=1.0,
    )
    name = "multi_modal_projector.mm_input_projection_weight"
    weight = Weight(name, (hidden_size, width), transposed=True)
    return b.finish(rows=b.linear_from(x, weight, name="projected"))
