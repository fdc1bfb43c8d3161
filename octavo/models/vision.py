"""Common parts of vision towers: image layout, attention among patches, and the Programs "vision"
and "projector".

An image is divided into square patches, one row each; `cell` x `cell` patches form one row of the
decoder. "vision" computes a row per patch, "projector" one per cell.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.config_keys import refuse_unread
from octavo.models.hf_config import HfConfig
from octavo.program.builder import Builder
from octavo.program.ops import RopeTable
from octavo.program.program import CacheGroup, Program, Value, Weight

IMAGE, WINDOW = "image", "window"
"""Cache groups for keys of the entire image and of one window."""

TOWER = ("vision", "projector")
"""Programs of an image's rows, in execution order."""

KEPT_LAYERS = 2
"""Number of layers whose keys are stored. Each layer's keys are read only by that layer, so two
sets alternate; with one, a layer could overwrite keys that slower threads still read.
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
    named_by: int | None = None
    """Token that refers to an image in a prompt; None: the row token."""
    written: tuple[int | str, ...] = ()
    """Tokens and texts that replace that token, including the row token once; (): only the row
    token."""
    num_frames: int = 1
    """Number of times that a patch's pixels are repeated in its row: video towers expect several
    frames.
    """
    window: int | None = None
    """Side of a window in cells, if some layers use windowed attention."""
    has_grid_positions: bool = False
    """Whether a patch's positions are its row and column instead of its index."""
    is_whole: bool = False
    """Whether an image's decoder rows attend to one another."""
    side: int | None = None
    """Fixed side of every image in pixels; None: the aspect ratio is kept."""

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


def vision_config(config: HfConfig) -> HfConfig:
    return HfConfig(config.table("vision_config"))


def refuse_unread_vision(vision: HfConfig) -> None:
    """Raises UnsupportedModel if a key of the tower's config was not read."""
    vision.without_effect("model_type", "initializer_range", "attention_dropout", "dtype")
    refuse_unread({"model_type": "vision_config", **vision.values}, vision.values.asked)


def patches(b: Builder, name: str, width: int, kernel: tuple[int, ...], *, bias: bool) -> Value:
    """Appends the patch embedding: a convolution with one patch per kernel."""
    num_pixels = 1
    for size in kernel:
        num_pixels *= size
    weight = Weight(f"{name}.weight", (width, num_pixels), kernel=kernel)
    added = Weight(f"{name}.bias", (width,)) if bias else None
    return b.linear_from(b.given_rows(num_pixels), weight, added, name=name)


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


def finish_vision(b: Builder, x: Value) -> Program:
    """Ends the Program "vision", with one row per patch."""
    return b.finish(rows=b.gather_rows(x))
