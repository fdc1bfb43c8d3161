"""Gemma 4 with images and audio: a vision transformer with norms around each sublayer, whose rows
are averaged per cell, the audio tower of `gemma4_audio.py` and the decoder of `gemma4_text.py`.

Gemma team 2026. Not supported: images of the larger models, whose image tokens attend to one
another.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models import gemma4_audio
from octavo.models.audio import AudioLayout
from octavo.models.clipped_linears import ClippedLinears
from octavo.models.config_keys import TOWERS
from octavo.models.gemma4_text import build_gemma4
from octavo.models.gemma_parts import scale_columns
from octavo.models.hf_config import HfConfig
from octavo.models.vision import (
    IMAGE,
    KEPT_LAYERS,
    ImageLayout,
    VideoLayout,
    finish_vision,
    get_axial_theta,
    refuse_unread_vision,
    vision_config,
)
from octavo.program.builder import Builder
from octavo.program.ops import Embedding, RopeTable
from octavo.program.program import CacheGroup, Program, Value, Weight

TOKENS = 280
"""Default of the most tokens of an image."""


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect(*TOWERS)
    sees, hears = image_layout(config) is not None, bool(config.table("audio_config"))
    programs = build_gemma4(config, has_media=sees or hears)
    if sees:
        programs |= _build_vision(config)
    if hears:
        programs |= gemma4_audio.build_audio(config)
    return programs


def audio_layout(config: HfConfig) -> AudioLayout:
    return gemma4_audio.audio_layout(config)


def _build_vision(config: HfConfig) -> dict[str, Program]:
    vision = vision_config(config)
    tower = _Tower.read(vision, ClippedLinears.read(config, vision)).build()
    projector = _projector(config, vision)
    vision.without_effect("pooling_kernel_size", "rope_theta", "global_head_dim")
    vision.without_effect("default_output_length")  # the image processor's file decides
    refuse_unread_vision(vision)
    return {"vision": tower, "projector": projector}


def image_layout(config: HfConfig) -> ImageLayout | None:
    """Returns the image layout; None if the model reads no images here: models whose image tokens
    attend to one another do so in sliding-window layers alone, which is not supported.
    """
    has_tower = bool(config.table("vision_config"))
    if not has_tower or config.values.get("use_bidirectional_attention") == "vision":
        return None
    vision = vision_config(config)
    token_id = config.integer("image_token_id", 258_880)
    begin, end = config.integer("boi_token_id", 255_999), config.integer("eoi_token_id", 258_882)
    has_own_inputs = config.integer("hidden_size_per_layer_input", 256) > 0
    return ImageLayout(
        patch_size=vision.size("patch_size", 16),
        cell=vision.size("pooling_kernel_size", 3),
        token_id=token_id,
        row_id=config.integer("pad_token_id", 0) if has_own_inputs else None,
        written=(begin, token_id, end),
        has_grid_positions=True,
        video=VideoLayout(
            token_id=config.integer("video_token_id", 258_884),
            begin=begin,
            end=end,
            uses_clock=True,
        ),
        resize="budget",
        default_tokens=config.size("vision_soft_tokens_per_image", TOKENS),
        colors_last=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tower:
    """The transformer over an image's patches."""

    vision: HfConfig
    clips: ClippedLinears
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    ropes: tuple[RopeTable, RopeTable]
    """Tables of both halves of a head, which rotate by column and by row."""

    @staticmethod
    def read(vision: HfConfig, clips: ClippedLinears) -> _Tower:
        num_heads, dim = vision.size("num_attention_heads", 12), vision.size("head_dim", 64)
        num_kv_heads = vision.size("num_key_value_heads", 12)
        if num_heads % num_kv_heads or dim % 4:
            raise UnsupportedModel(
                f"config.json: vision_config has {num_heads} heads of {dim} columns and"
                f" {num_kv_heads} key-value heads, expected a divisor of the heads, and multiples"
                " of 4 columns"
            )
        vision.refuse_unless("attention_bias", False)
        theta, half = get_axial_theta(vision, 100.0), dim // 2
        frequencies = tuple(theta ** -(i / half) for i in range(0, half, 2))
        by_row, by_column = (
            RopeTable(frequencies, axes=(axis,) * len(frequencies)) for axis in (0, 1)
        )
        return _Tower(
            vision=vision,
            clips=clips,
            hidden_size=vision.size("hidden_size", 768),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            eps=vision.number("rms_norm_eps", 1e-6),
            ropes=(by_column, by_row),
        )

    def build(self) -> Program:
        dim = self.head_dim
        group = CacheGroup(IMAGE, "full", KEPT_LAYERS, self.num_kv_heads, dim, dim, one_step=True)
        b = Builder("vision", (group,))
        x = self._embed(b)
        for i in range(self.vision.count("num_hidden_layers", 16)):
            x = self._layer(b, x, i)
        x = b.scale(x, self.hidden_size**0.5)
        if self.vision.flag("standardize", False):
            bias = b.value("std_bias", "tokens", self.hidden_size)
            name = "vision_tower.std_bias"
            table = Weight(name, (1, self.hidden_size), (name,))
            b.append(Embedding(bias, table, by_position=True, others_first=True))
            x = scale_columns(b, b.add(x, b.scale(bias, -1.0)), "vision_tower.std_scale")
        return finish_vision(b, x)

    def _embed(self, b: Builder) -> Value:
        """Appends the patch embedding, and one of each patch's column and row."""
        vision, name = self.vision, "vision_tower.patch_embedder"
        pixels = b.input_rows(3 * vision.size("patch_size", 16) ** 2)
        x = b.linear(pixels, f"{name}.input_proj", self.hidden_size)
        count = vision.integer("position_embedding_size", 10_240, low=1)
        table = Weight(
            f"{name}.position_embedding_table",
            (2 * count, self.hidden_size),
            kernel=(2,),
            stored_as="planes",
        )
        positions = b.add(
            b.embed_positions(table, axis=1), b.embed_positions(table, offset=count, axis=0)
        )
        return b.add(x, positions)

    def _layer(self, b: Builder, x: Value, i: int) -> Value:
        name = f"vision_tower.encoder.layers.{i}"
        h = self._attend(b, self._norm(b, x, f"{name}.input_layernorm"), f"{name}.self_attn", i)
        x = b.add(x, self._norm(b, h, f"{name}.post_attention_layernorm"))
        h = self._mlp(b, self._norm(b, x, f"{name}.pre_feedforward_layernorm"), f"{name}.mlp")
        return b.add(x, self._norm(b, h, f"{name}.post_feedforward_layernorm"))

    def _attend(self, b: Builder, x: Value, name: str, i: int) -> Value:
        dim, kept = self.head_dim, i % KEPT_LAYERS
        heads = (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads))
        q, k, v = (
            self.clips.linear(b, x, f"{name}.{part}_proj", count * dim) for part, count in heads
        )
        q = b.rms_norm(q, f"{name}.q_norm", self.eps, group_width=dim)
        k = b.rms_norm(k, f"{name}.k_norm", self.eps, group_width=dim)
        v = b.rms_norm(v, f"{name}.v_norm", self.eps, has_weight=False, group_width=dim)
        for half, table in enumerate(self.ropes):
            q = b.rope(q, self.num_heads, table, rotary_start=half * dim // 2)
            k = b.rope(k, self.num_kv_heads, table, rotary_start=half * dim // 2)
        b.kv_write(IMAGE, kept, (k,), v)
        out = b.attention(q, IMAGE, kept, num_heads=self.num_heads, scale=1.0, mask="full")
        return self.clips.linear(b, out, f"{name}.o_proj", self.hidden_size)

    def _mlp(self, b: Builder, x: Value, name: str) -> Value:
        width = self.vision.size("intermediate_size", 3072)
        gate = self.clips.linear(b, x, f"{name}.gate_proj", width)
        up = self.clips.linear(b, x, f"{name}.up_proj", width)
        activation = self.vision.activation("hidden_activation", "gelu_pytorch_tanh")
        rows = b.act_mul(gate, up, activation)
        return self.clips.linear(b, rows, f"{name}.down_proj", self.hidden_size)

    def _norm(self, b: Builder, x: Value, name: str) -> Value:
        return b.rms_norm(x, name, self.eps)


def _projector(config: HfConfig, vision: HfConfig) -> Program:
    """Returns the projector: the mean of a cell's patches, norm and matmul."""
    b = Builder("projector")
    x = b.pool_rows(b.input_rows(vision.size("hidden_size", 768)), "mean")
    eps = vision.number("rms_norm_eps", 1e-6)
    x = b.rms_norm(x, "embed_vision.embedding_pre_projection_norm", eps, has_weight=False)
    rows = b.linear(x, "embed_vision.embedding_projection", config.size("hidden_size"))
    return b.finish(rows=rows)
