"""Qwen3-VL: a tower with interpolated position embeddings, and Qwen3 with interleaved M-RoPE, to
whose first layers the rows of intermediate tower layers are added (DeepStack).

Bai et al. 2025; DeepStack: Meng et al. 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from octavo.api.errors import UnsupportedModel
from octavo.models.config_keys import TOWERS
from octavo.models.decoder import DecoderShape, Frame, Sublayer
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.mlps import plain_mlp
from octavo.models.mrope import mrope_table
from octavo.models.qwen2_vl import EPS, get_patch_shape, read_shape, turned_qkv
from octavo.models.qwen2_vl import image_layout as flat_layout
from octavo.models.vision import (
    IMAGE,
    TAPS,
    ImageLayout,
    VideoLayout,
    attend,
    finish_vision,
    get_axial_theta,
    interpolated_positions,
    patches,
    refuse_unread_vision,
    vision_config,
)
from octavo.program.build_family_ops import columns, concat
from octavo.program.builder import Builder
from octavo.program.ops import RopeTable
from octavo.program.program import Program, Value

SECTIONS, THETA = (24, 20, 20), 500_000.0
"""Defaults of mrope_section and rope_theta."""

PATCH_SIZE, NUM_POSITIONS = 16, 2304
"""Defaults of patch_size and num_position_embeddings."""

TAPPED = (8, 16, 24)
"""Default of deepstack_visual_indexes."""


def build(config: HfConfig) -> dict[str, Program]:
    return build_qwen3_vl(config, DecoderShape.read(config, num_kv_heads=32, head_dim=128))


def build_qwen3_vl(
    config: HfConfig, shape: DecoderShape, mlp: Sublayer | None = None
) -> dict[str, Program]:
    """Builds the decoder and the tower; `mlp` replaces the gated MLP."""
    bias = config.flag("attention_bias", False)
    decoder = build_llama(
        config,
        shape=shape,
        ropes=(text_rope(config, shape),) * shape.num_layers,
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        mlp=mlp,
        frame=text_frame(config, shape),
    )
    return {**decoder, **build_tower(config)}


def image_layout(config: HfConfig) -> ImageLayout:
    """Returns Qwen2-VL's layout with an interpolated position table and DeepStack."""
    return replace(table_layout(config), num_levels=1 + len(get_tapped(vision_config(config))))


def table_layout(config: HfConfig) -> ImageLayout:
    """Returns Qwen2-VL's layout with an interpolated position table."""
    vision = vision_config(config)
    return replace(
        flat_layout(config),
        patch_size=vision.size("patch_size", PATCH_SIZE),
        video=VideoLayout(
            token_id=config.integer("video_token_id", 151_656),
            begin=config.integer("vision_start_token_id", 151_652),
            end=config.integer("vision_end_token_id", 151_653),
        ),
        table_side=math.isqrt(vision.integer("num_position_embeddings", NUM_POSITIONS, low=1)),
    )


def text_rope(config: HfConfig, shape: DecoderShape) -> RopeTable:
    return mrope_table(config, shape.head_dim, sections=SECTIONS, theta=THETA, interleaved=True)


def text_frame(config: HfConfig, shape: DecoderShape) -> Frame:
    """Returns the decoder's frame, with image rows in its first layers."""
    config.without_effect(*TOWERS)
    num_deep = len(get_tapped(vision_config(config)))
    if num_deep > shape.num_layers:
        raise UnsupportedModel(
            f"config.json: deepstack_visual_indexes has {num_deep} entries, expected at most the"
            f" {shape.num_layers} layers of the decoder"
        )
    return Frame(takes_rows=True, deep_rows=num_deep)


def get_tapped(vision: HfConfig) -> Mapping[int, int]:
    """Returns the tower's layers whose rows the decoder reads, in order, each with the index of its
    merger.
    """
    given = vision.values.get("deepstack_visual_indexes")
    layers = TAPPED if given is None else vision.integers("deepstack_visual_indexes")
    depth = vision.count("depth", 27)
    if len(set(layers)) != len(layers) or not all(0 <= layer < depth for layer in layers):
        raise UnsupportedModel(
            f"config.json: deepstack_visual_indexes in vision_config is {list(layers)!r}, expected"
            f" different layers from 0 to {depth - 1}"
        )
    return {layer: layers.index(layer) for layer in sorted(layers)}


def build_tower(config: HfConfig, *, has_deep_rows: bool = True) -> dict[str, Program]:
    """Builds the tower's Programs; without `has_deep_rows` only the last layer's rows are
    projected.
    """
    vision = vision_config(config)
    tapped = get_tapped(vision) if has_deep_rows else {}
    vision.without_effect("deepstack_visual_indexes", "out_hidden_size")
    programs = {
        "vision": _tower(vision, tapped),
        "projector": _projector(vision, config.size("hidden_size"), list(tapped.values())),
    }
    refuse_unread_vision(vision)
    return programs


def _tower(vision: HfConfig, tapped: Mapping[int, int]) -> Program:
    shape = read_shape(vision, width="hidden_size", default_size=1152, depth=27)
    width = vision.size("intermediate_size", 4304)
    activation = vision.activation("hidden_act", "gelu_pytorch_tanh")
    rope, kernel = (
        shape.axial_rope(get_axial_theta(vision)),
        get_patch_shape(vision, patch_size=PATCH_SIZE),
    )
    b = Builder("vision", shape.groups(IMAGE))
    num_pixels, num_rows = (
        math.prod(kernel),
        vision.integer("num_position_embeddings", NUM_POSITIONS, low=1),
    )
    given = b.input_rows(num_pixels + TAPS)
    pixels, shares = columns(b, given, 0, num_pixels), columns(b, given, num_pixels, TAPS)
    x = patches(b, "visual.patch_embed.proj", shape.hidden_size, kernel, bias=True, given=pixels)
    x = interpolated_positions(b, x, shares, "visual.pos_embed", num_rows, first_axis=2)
    deep: list[Value] = []
    for i in range(shape.num_layers):
        layer = f"visual.blocks.{i}"
        qkv = turned_qkv(b, b.layer_norm(x, f"{layer}.norm1", EPS), layer, shape, rope)
        attended = attend(b, qkv, shape, i)
        x = b.add(x, b.linear(attended, f"{layer}.attn.proj", shape.hidden_size, bias=True))
        normed, names = b.layer_norm(x, f"{layer}.norm2", EPS), ("linear_fc1", "linear_fc2")
        x = b.add(x, plain_mlp(b, normed, f"{layer}.mlp", width, activation, names=names))
        if i in tapped:
            deep.append(x)
    return finish_vision(b, concat(b, [b.layer_norm(x, "visual.merger.norm", EPS), *deep]))


def _projector(vision: HfConfig, hidden_size: int, mergers: list[int]) -> Program:
    """Returns the projector: one row per cell for the last layer, and for each tapped layer with
    the given mergers, whose norm covers the cell.
    """
    width = vision.size("hidden_size", 1152) * vision.size("spatial_merge_size", 2) ** 2
    names = ("linear_fc1", "linear_fc2")
    b = Builder("projector")

    def project(x: Value, name: str) -> Value:
        inner = b.act(b.linear(x, f"{name}.{names[0]}", width, bias=True), "gelu")
        return b.linear(inner, f"{name}.{names[1]}", hidden_size, bias=True)

    given = b.input_rows(width * (1 + len(mergers)))
    rows = [project(columns(b, given, 0, width), "visual.merger")]
    for level, merger in enumerate(mergers, 1):
        name = f"visual.deepstack_merger_list.{merger}"
        cells = columns(b, given, level * width, width)
        rows.append(project(b.layer_norm(cells, f"{name}.norm", EPS), name))
    return b.finish(rows=b.gather_rows(concat(b, rows)))
