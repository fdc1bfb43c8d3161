"""The parts that towers for images share: how an image becomes a Program's rows, the attention
among its patches, and the Programs that follow one another.

An image is cut into square patches, each a row; `cell` times `cell` neighbouring patches make one
row of the decoder. The Program "vision" makes a row of each patch, "projector" one of each cell.
Knows no file and no pixel.
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
"""Cache groups of keys of the whole image, and of one window of it."""

TOWER = ("vision", "projector")
"""Programs of an image's rows, in the order in which they run."""

KEPT_LAYERS = 2
"""Layers of keys that are kept: a step reads those of one layer and then never again. With two in
turn no layer overwrites keys that slower threads still read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """The order in which an image's pixels become a tower's rows, and the tokens that stand for
    them.
    """

    patch_size: int
    """Pixels of a patch's side."""
    cell: int
    """Patches of a cell's side; a cell becomes one row of the decoder."""
    token_id: int
    """Token that stands for a row of an image."""
    named_by: int | None = None
    """Token by which a prompt's text names an image; None: the token of its rows."""
    written: tuple[int | str, ...] = ()
    """Tokens and texts that stand in that one's place, the token of its rows once among them; ():
    the token itself."""
    num_frames: int = 1
    """Times that a patch's pixels stand in its row: towers for videos take several frames."""
    window: int | None = None
    """Cells of a window's side, where some layers attend within windows; None: none does."""
    has_grid_positions: bool = False
    """Whether a patch's positions are its row and column; else its one position is its index."""
    is_whole: bool = False
    """Whether the decoder's rows of an image see one another."""
    side: int | None = None
    """Pixels of the side of every image; None: images keep their shape."""

    @property
    def multiple(self) -> int:
        """Number of pixels that an image's height and width are multiples of."""
        return self.patch_size * self.cell

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
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
        """Refuses heads that do not fill a row."""
        if self.hidden_size % self.num_heads:
            raise UnsupportedModel(
                f"config.json: vision_config's hidden size {self.hidden_size} is no multiple of its"
                f" {self.num_heads} heads"
            )

    def groups(self, *names: str) -> tuple[CacheGroup, ...]:
        """Returns the cache groups of a tower's keys."""
        heads = (self.num_heads, self.head_dim, self.head_dim)
        return tuple(CacheGroup(name, "full", KEPT_LAYERS, *heads, one_step=True) for name in names)

    def axial_rope(self, theta: float) -> RopeTable:
        """Returns the table by which half of a head turns with the row and half with the column."""
        dim = self.head_dim // 2
        frequencies = tuple(theta ** -(i / dim) for i in range(0, dim, 2))
        count = len(frequencies)
        return RopeTable(frequencies * 2, axes=(0,) * count + (1,) * count)


def vision_config(config: HfConfig) -> HfConfig:
    """Returns the tower's part of a config."""
    return HfConfig(config.table("vision_config"))


def refuse_unread_vision(vision: HfConfig) -> None:
    """Refuses a tower's config with a key that nothing read."""
    vision.without_effect("model_type", "initializer_range", "attention_dropout", "dtype")
    refuse_unread({"model_type": "vision_config", **vision.values}, vision.values.asked)


def patches(b: Builder, name: str, width: int, kernel: tuple[int, ...], *, bias: bool) -> Value:
    """Appends the embedding of the step's patches: a convolution whose kernel covers one."""
    num_pixels = 1
    for size in kernel:
        num_pixels *= size
    weight = Weight(f"{name}.weight", (width, num_pixels), kernel=kernel)
    added = Weight(f"{name}.bias", (width,)) if bias else None
    return b.linear_of(b.given_rows(num_pixels), weight, added, name=name)


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
    """Ends the Program "vision", whose rows are those of the patches."""
    return b.finish(rows=b.gather_rows(x))
