"""Rows of an image that was padded to a grid of tiles: how many remain without the padding.

The rows are those of a view of the entire image, followed by those of the tiles line by line, with
a newline row after each line. Source: `pack_image_features` of LLaVA-NeXT and LLaVA-OneVision in
transformers 5.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MAX_EXCESS = 1.1
"""Rows of more than this times the most tiles, as a length, are scaled down."""


class PackedRows(NamedTuple):
    """Part of the tiles' rows without the padding, in rows of the tower."""

    top: int
    left: int
    height: int
    width: int
    scaled_height: int
    scaled_width: int
    """Size after scaling; equal to the size before it in most cases."""

    @property
    def num_rows(self) -> int:
        """Rows and newline rows."""
        return self.scaled_height * (self.scaled_width + 1)


def pack_rows(
    side: int, tiles: tuple[int, int], source: tuple[int, int], max_tiles: int | None
) -> PackedRows:
    """Returns the part of an image of `source` pixels (height, width) in `tiles` rows and columns
    of tiles, each of `side` x `side` rows. Beyond `max_tiles`, rows are scaled down; None: never.
    """
    height, width = tiles[0] * side, tiles[1] * side
    top = left = 0
    if source[1] / source[0] > width / height:
        top = (height - int(round(source[0] * (width / source[1]), 7))) // 2
    else:
        left = (width - int(round(source[1] * (height / source[0]), 7))) // 2
    height, width = height - 2 * top, width - 2 * left
    scaled = height, width
    if max_tiles is not None:
        ratio = math.sqrt(height * width / (max_tiles * side**2))
        if ratio > MAX_EXCESS:
            scaled = int(height // ratio), int(width // ratio)
    return PackedRows(top, left, height, width, *scaled)
