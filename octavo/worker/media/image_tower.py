"""A model's vision tower: encodes an image's pixels as rows of the decoder.

Each image is computed separately, so its rows depend only on its pixels. The keys of its patches
are kept only while it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.engine.protocol.packed_image import pack_rows
from octavo.engine.protocol.step import MediaContent
from octavo.models.vision import NEWLINE, TOWER, ImageLayout
from octavo.worker.media.packing import pack_views
from octavo.worker.media.patches import (
    PixelScale,
    Rows,
    cut_patches,
    rows_batch,
    tower_batch,
)
from octavo.worker.media.tower import TowerPrograms


@dataclass(frozen=True, slots=True)
class ImageTower:
    """The Programs of a vision tower, and its image layout."""

    layout: ImageLayout
    scale: PixelScale
    parts: TowerPrograms

    def encode(self, image: MediaContent) -> Rows:
        """Returns the decoder's rows of an image in the order of its tokens,
        `[num_tokens, num_levels * W]`.
        """
        if NEWLINE not in self.parts.programs:
            return self._encode_view(image)
        return self._pack(image, [self._encode_view(view) for view in square_views(image)])

    def _encode_view(self, image: MediaContent) -> Rows:
        """Returns the rows of a view in raster order."""
        patches = cut_patches(image, self.layout, self.scale)
        vision, projector = TOWER
        groups = self.parts.programs[vision].groups
        batch = tower_batch(patches, groups, has_class_row=self.layout.has_class_row)
        rows = self.parts.run(vision, batch)
        cell_rows = self.layout.cell**2
        cells = rows.reshape(len(rows) // cell_rows, cell_rows, -1)
        if self.layout.splits_columns:
            cells = cells.transpose((0, 2, 1))
        elif self.layout.num_levels > 1:
            levels = cells.reshape(*cells.shape[:2], self.layout.num_levels, -1)
            cells = levels.swapaxes(1, 2).reshape(cells.shape)
        return self.parts.project(projector, cells)[patches.cell_order]

    def _pack(self, image: MediaContent, views: list[Rows]) -> Rows:
        """Returns the rows of an image's views with newline rows."""
        newline = self.parts.run(NEWLINE, rows_batch(np.zeros_like(views[0][:1]), 1))
        if image.tiles == (0, 0):
            return np.concatenate([views[0], newline])
        side = image.width // self.layout.multiple
        packed = pack_rows(side, image.tiles, image.source, self.layout.max_tiles)
        return pack_views(views, image.tiles, packed, newline)


def square_views(image: MediaContent) -> list[MediaContent]:
    """Returns the square views of an image with tiles; the image itself if it has none."""
    if image.tiles == (0, 0):
        return [image]
    side = image.width
    num_bytes = 3 * side * side
    return [
        MediaContent(image.digest, side, side, image.data[start : start + num_bytes])
        for start in range(0, len(image.data), num_bytes)
    ]
