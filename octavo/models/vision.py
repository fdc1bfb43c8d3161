"""Common parts of vision towers: image layout, attention among patches, and the Programs "vision"
and "projector".

An image is divided into square patches, one row each; `cell` x `cell` patches form one row of the
decoder. "vision" computes a row per patch, "projector" one per cell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from octavo.api.errors import UnsupportedModel
from octavo.models.config_keys import refuse_unread
from octavo.models.hf_config import HfConfig
from octavo.program.build_family_ops import mix
from octavo.program.builder import Builder
from octavo.program.ops import Attention, Embedding, RopeTable, ScatterRows
from octavo.program.program import CacheGroup, Op, Program, Value, Weight

IMAGE, WINDOW = "image", "window"
"""Cache groups for keys of the entire image and of one window."""

TOWER = ("vision", "projector")
"""Programs of an image's rows, in execution order."""

TAPS = 4
"""Table rows of a bilinearly interpolated position embedding."""

NEWLINE = "newline"
"""Program of the row after each line of an image, if a model has one."""

KEPT_LAYERS = 2
"""Number of layers whose keys are stored. Each layer's keys are read only by that layer, so two
sets alternate; with one, a layer could overwrite keys that slower threads still read.
"""


@dataclass(frozen=True, slots=True)
class TileTexts:
    """Texts around the tokens of an image that is divided into tiles, with a view of the entire
    image at the end.
    """

    tile: str
    """Before the tokens of a tile; contains {row} and {column}, counted from 1."""
    row_end: str
    entire: str
    """Before the tokens of the entire image."""
    after_tiles: str
    """Before `entire` if there are tiles."""
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLayout:
    """Placeholder tokens and positions of a video's frames."""

    token_id: int
    """Placeholder token of a video's rows."""
    begin: int | None = None
    """Token before a group of frames, after its timestamp; None: groups follow each other."""
    end: int | None = None
    """Token after a group of frames."""
    positions_per_second: int | None = None
    """Positions in time per second of a video without timestamps; None: one per group."""
    uses_clock: bool = False
    """Whether timestamps are minutes and seconds (00:05), with frames that are sampled evenly
    (Gemma 4), instead of seconds with tenths.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Mapping from an image's pixels to a tower's rows, and its placeholder tokens."""

    patch_size: int
    """Side of a patch in pixels."""
    cell: int
    """Side of a cell in patches; a cell becomes one row of the decoder."""
    token_id: int
    """Placeholder token of an image row."""
    row_id: int | None = None
    """Token of an image row in prompts; None: `token_id`."""
    named_by: int | None = None
    """Token that refers to an image in a prompt; None: the row token."""
    written: tuple[int | str, ...] = ()
    """Tokens and texts that replace that token, including the row token once; (): only the row
    token."""
    num_frames: int = 1
    """Number of times that a patch's pixels are repeated in its row: video towers expect several
    frames.
    """
    video: VideoLayout | None = None
    """How videos are represented, in groups of `num_frames`; None: the model reads none."""
    window: int | None = None
    """Side of a window in cells, if some layers use windowed attention."""
    has_grid_positions: bool = False
    """Whether a patch's positions are its row and column instead of its index."""
    is_whole: bool = False
    """Whether an image's decoder rows attend to one another."""
    side: int | None = None
    """Fixed side of every image in pixels; None: the aspect ratio is kept."""
    resize: (
        Literal[
            "area",
            "longest_edge",
            "square",
            "crop",
            "tiles",
            "best_tiles",
            "padded_tiles",
            "budget",
        ]
        | None
    ) = None
    """How images are resized; None: to `side`, or within an area if the aspect ratio is kept."""
    default_tokens: int | None = None
    """Most tokens of an image unless the image processor's file says; None: the file's area."""
    tile_texts: TileTexts | None = None
    resolutions: tuple[tuple[int, int], ...] = ()
    """Heights and widths that an image of padded tiles may be padded to."""
    max_tiles: int | None = None
    """Most tiles whose rows are not scaled down; None: any number."""
    tiles_alone: bool = False
    """Whether only the image of a prompt with one image is divided into tiles."""
    prefix: tuple[str, str] | None = None
    """Texts after the images and after the prompt, if all tokens of a prompt with images attend to
    one another; None: text is causal."""
    line_end: str | None = None
    """Text of the token after each line of image tokens."""
    image_end: str | None = None
    """Text of the token that replaces the last `line_end`."""
    has_class_row: bool = False
    """Whether the tower computes a class row before the patches."""
    colors_last: bool = False
    """Whether a patch's row holds the colors of one pixel side by side."""
    splits_columns: bool = False
    """Whether a cell's row holds the values of one column of all patches side by side, instead of
    one patch after the other."""
    table_side: int | None = None
    """Side of a square table of position embeddings that is interpolated to the image's patches;
    None: no interpolation. A patch's row then ends with the weights of its `TAPS` table rows, whose
    indices follow its positions."""
    num_levels: int = 1
    """Number of the tower's layers whose rows are projected (DeepStack); their columns follow one
    another."""

    @property
    def multiple(self) -> int:
        """Image heights and widths are multiples of this many pixels."""
        return self.patch_size * self.cell

    def get_grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of an image's tokens."""
        return height // self.multiple, width // self.multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Sizes of a tower's transformer."""

    hidden_size: int
    num_layers: int
    num_heads: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def check(self) -> None:
        """Raises UnsupportedModel if the heads do not divide the hidden size."""
        if self.hidden_size % self.num_heads:
            raise UnsupportedModel(
                f"config.json: vision_config's hidden size {self.hidden_size} is not a multiple of"
                f" its"
                f" {self.num_heads} heads"
            )

    def groups(self, *names: str) -> tuple[CacheGroup, ...]:
        heads = (self.num_heads, self.head_dim, self.head_dim)
        return tuple(CacheGroup(name, "full", KEPT_LAYERS, *heads, one_step=True) for name in names)

    def axial_rope(self, theta: float) -> RopeTable:
        """Returns a RoPE table with half of a head rotated by row and half by column."""
        dim = self.head_dim // 2
        frequencies = tuple(theta ** -(i / dim) for i in range(0, dim, 2))
        count = len(frequencies)
        return RopeTable(frequencies * 2, axes=(0,) * count + (1,) * count)


def with_image_rows(program: Program, *, sees_ahead: bool = False) -> Program:
    """Returns a decoder in which external rows may replace token embeddings.

    With `sees_ahead`, image tokens may attend to later ones.
    """
    ops: list[Op] = []
    values: dict[Value, Value] = {}
    for op in program.ops:
        op = op.on(values)
        if sees_ahead and isinstance(op, Attention):
            op = replace(op, sees_ahead=True)
        ops.append(op)
        if isinstance(op, Embedding) and op.ids is not None and not values:
            out = replace(op.out, name=f"{op.out.name}.with_images")
            ops.append(ScatterRows(out, op.out))
            values[op.out] = out
    return replace(program, ops=tuple(ops))


def vision_config(config: HfConfig) -> HfConfig:
    return HfConfig(config.table("vision_config"))


def get_axial_theta(vision: HfConfig, default: float = 10_000.0) -> float:
    """Returns the base of a tower's RoPE by row and column."""
    given = vision.table("rope_parameters")
    if given.get("rope_type", "axial") not in ("axial", "default"):  # older files: "default"
        raise UnsupportedModel(
            f"config.json: rope_type in vision_config is {given['rope_type']!r}, expected 'axial'"
        )
    return float(given.get("rope_theta") or vision.positive("rope_theta", default))


def refuse_unread_vision(vision: HfConfig) -> None:
    """Raises UnsupportedModel if a key of the tower's config was not read."""
    vision.without_effect("model_type", "initializer_range", "attention_dropout", "dtype")
    refuse_unread({"model_type": "vision_config", **vision.values}, vision.values.asked)


def patches(
    b: Builder,
    name: str,
    width: int,
    kernel: tuple[int, ...],
    *,
    bias: bool,
    given: Value | None = None,
) -> Value:
    """Appends the patch embedding: a convolution with one patch per kernel. `given` are the pixels;
    None: the step's external rows.
    """
    num_pixels = math.prod(kernel)
    weight = Weight(f"{name}.weight", (width, num_pixels), kernel=kernel)
    added = Weight(f"{name}.bias", (width,)) if bias else None
    return b.linear_from(given or b.input_rows(num_pixels), weight, added, name=name)


def interpolated_positions(
    b: Builder, x: Value, shares: Value, name: str, num_rows: int, *, first_axis: int
) -> Value:
    """Adds the sum of `TAPS` rows of a position table, weighted by `shares [T, TAPS]`; `first_axis`
    is the position axis of the first row's index.
    """
    taps = [
        b.position_embedding(name, num_rows, x.width, axis=first_axis + tap) for tap in range(TAPS)
    ]
    (out,) = mix(b, taps, (x,), shares)
    return out


def attend(
    b: Builder, qkv: tuple[Value, Value, Value], shape: VisionShape, layer: int, group: str = IMAGE
) -> Value:
    """Appends the attention of a layer's patches to all keys of the group."""
    q, k, v = qkv
    kept = layer % KEPT_LAYERS
    b.kv_write(group, kept, (k,), v)
    return b.attention(
        q,
        group,
        kept,
        num_heads=shape.num_heads,
        scale=shape.head_dim**-0.5,
        mask="full",
    )


QUICK_GELU = 1.702
"""Factor of quick GELU, x * sigmoid(1.702 x)."""


def quick_gelu(b: Builder, x: Value) -> Value:
    return b.scale(b.act(b.scale(x, QUICK_GELU), "silu"), 1 / QUICK_GELU)


def finish_vision(b: Builder, x: Value) -> Program:
    """Ends the Program "vision", with one row per patch."""
    return b.finish(rows=b.gather_rows(x))
