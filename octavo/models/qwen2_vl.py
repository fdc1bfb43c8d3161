"""Qwen2-VL: a tower with 2D RoPE, a merger of four patches, and Qwen2 with M-RoPE (time, row,
column).

Wang et al. 2024. Videos are not supported.
"""

from __future__ import annotations

from octavo.models.config_keys import TOWERS
from octavo.models.decoder import DecoderShape, Frame
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.matrix_rows import Rows, linear_part
from octavo.models.mrope import mrope_table
from octavo.models.qwen2 import upper_windows
from octavo.models.vision import (
    IMAGE,
    ImageLayout,
    VideoLayout,
    VisionShape,
    attend,
    finish_vision,
    get_axial_theta,
    patches,
    quick_gelu,
    refuse_unread_vision,
    vision_config,
)
from octavo.program.builder import Builder
from octavo.program.ops import RopeTable
from octavo.program.program import Program, Value

EPS = 1e-6
"""Epsilon of the tower's norms; not in the config."""


def build(config: HfConfig) -> dict[str, Program]:
    decoder = build_text(config)
    vision = vision_config(config)
    layout = image_layout(config)
    tower = _tower(vision)
    projector = merger(vision, layout, config.size("hidden_size"), centered=True)
    refuse_unread_vision(vision)
    return {**decoder, "vision": tower, "projector": projector}


def image_layout(config: HfConfig) -> ImageLayout:
    """Returns the image layout: cells of patches, aspect ratio preserved."""
    vision = vision_config(config)
    return ImageLayout(
        patch_size=vision.size("patch_size", 14),
        cell=vision.size("spatial_merge_size", 2),
        token_id=config.integer("image_token_id", 151_655),
        num_frames=vision.size("temporal_patch_size", 2),
        video=VideoLayout(token_id=config.integer("video_token_id", 151_656)),
        has_grid_positions=True,
    )


def build_text(config: HfConfig) -> dict[str, Program]:
    """Builds Qwen2's decoder with image rows and M-RoPE."""
    config.without_effect(*TOWERS, "vision_token_id")
    shape = DecoderShape.read(config, num_kv_heads=8)
    rope = mrope_table(config, shape.head_dim, sections=(16, 24, 24), theta=1_000_000.0)
    return build_llama(
        config,
        shape=shape,
        windows=upper_windows(config),
        ropes=(rope,) * shape.num_layers,
        qkv_bias=True,
        frame=Frame(takes_rows=True),
    )


def read_shape(
    vision: HfConfig, *, width: str, default_size: int = 1280, depth: int = 32
) -> VisionShape:
    """Reads a tower's sizes; `width` is the key of its hidden size."""
    shape = VisionShape(
        hidden_size=vision.size(width, default_size),
        num_layers=vision.count("depth", depth),
        num_heads=vision.size("num_heads", 16),
    )
    shape.check()
    return shape


def get_patch_shape(vision: HfConfig, *, patch_size: int = 14) -> tuple[int, ...]:
    """Returns the shape of a patch's pixels: channels, frames, rows, columns."""
    vision.without_effect("in_chans")
    patch_size = vision.size("patch_size", patch_size)
    frames = vision.size("temporal_patch_size", 2)
    return (vision.size("in_channels", 3), frames, patch_size, patch_size)


def turned_qkv(
    b: Builder, x: Value, layer: str, shape: VisionShape, rope: RopeTable
) -> tuple[Value, Value, Value]:
    """Appends q, k and v of one matmul, with RoPE on q and k."""
    width = shape.hidden_size
    q, k, v = (
        linear_part(b, x, f"{layer}.attn.qkv", Rows(width, 3 * width, start), bias=True)
        for start in (0, width, 2 * width)
    )
    return b.rope(q, shape.num_heads, rope), b.rope(k, shape.num_heads, rope), v


def _tower(vision: HfConfig) -> Program:
    shape = read_shape(vision, width="embed_dim")
    vision.without_effect("hidden_size", "spatial_merge_size", "spatial_patch_size")
    vision.refuse_unless("hidden_act", "quick_gelu")
    inner_width = int(shape.hidden_size * vision.positive("mlp_ratio", 4))
    rope = shape.axial_rope(get_axial_theta(vision))
    b = Builder("vision", shape.groups(IMAGE))
    x = patches(
        b, "visual.patch_embed.proj", shape.hidden_size, get_patch_shape(vision), bias=False
    )
    for i in range(shape.num_layers):
        layer = f"visual.blocks.{i}"
        normed = b.layer_norm(x, f"{layer}.norm1", EPS)
        attended = attend(b, turned_qkv(b, normed, layer, shape, rope), shape, i)
        x = b.add(x, b.linear(attended, f"{layer}.attn.proj", shape.hidden_size, bias=True))
        inner = b.linear(
            b.layer_norm(x, f"{layer}.norm2", EPS), f"{layer}.mlp.fc1", inner_width, bias=True
        )
        x = b.add(
            x, b.linear(quick_gelu(b, inner), f"{layer}.mlp.fc2", shape.hidden_size, bias=True)
        )
    normed = b.layer_norm(x, "visual.merger.ln_q", EPS)
    return finish_vision(b, normed)


def merger(vision: HfConfig, layout: ImageLayout, hidden_size: int, *, centered: bool) -> Program:
    """Returns the projector, which maps a cell's concatenated patches to one row."""
    width = vision.size("embed_dim" if centered else "hidden_size", 1280) * layout.cell**2
    b = Builder("projector")
    inner = b.linear(b.input_rows(width), "visual.merger.mlp.0", width, bias=True)
    out = b.linear(b.act(inner, "gelu"), "visual.merger.mlp.2", hidden_size, bias=True)
    return b.finish(rows=b.gather_rows(out))
