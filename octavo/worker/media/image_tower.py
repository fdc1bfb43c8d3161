"""A model's vision tower: encodes an image's pixels as rows of the decoder.

Each image is computed separately, so its rows depend only on its pixels. The keys of its patches
are kept only while it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.engine.protocol.packed_image import pack_rows
from octavo.engine.protocol.step import MediaPixels
from octavo.executor.base import Backend, Runnable
from octavo.executor.batch import StepBatch
from octavo.models.vision import NEWLINE, TOWER, ImageLayout
from octavo.program.program import Program
from octavo.worker.media.packing import pack_views
from octavo.worker.media.patches import (
    PixelScale,
    Rows,
    cut_patches,
    get_num_blocks,
    rows_batch,
    tower_batch,
)


@dataclass(frozen=True, slots=True)
class ImageTower:
    """Prepared Programs of a vision tower, and its image layout."""

    layout: ImageLayout
    scale: PixelScale
    programs: dict[str, Program]
    runnables: dict[str, Runnable]
    backend: Backend
    """Backend that prepared the Programs, with separate limits."""

    def encode(self, image: MediaPixels) -> Rows:
        """Returns the decoder's rows of an image in the order of its tokens,
        `[num_tokens, num_levels * W]`.
        """
        if NEWLINE not in self.programs:
            made = self._encode_view(image)
        else:
            views = [self._encode_view(view) for view in square_views(image)]
            made = self._pack(image, views)
        if not np.isfinite(made).all():
            raise ValueError("the tower's rows of an image contain NaN")
        return np.ascontiguousarray(made)

    def _encode_view(self, image: MediaPixels) -> Rows:
        """Returns the rows of a view in raster order."""
        patches = cut_patches(image, self.layout, self.scale)
        vision, projector = (self.programs[name] for name in TOWER)
        batch = tower_batch(patches, vision.groups, has_class_row=self.layout.has_class_row)
        rows = self._run(vision, batch)
        cell_rows = self.layout.cell**2
        if any(value.axis == "requests" for value in projector.outputs.values()):
            batch = rows_batch(rows, cell_rows)
        else:
            cells = rows.reshape(len(rows) // cell_rows, cell_rows, -1)
            if self.layout.splits_columns:
                cells = cells.transpose((0, 2, 1))
            elif self.layout.num_levels > 1:
                levels = cells.reshape(*cells.shape[:2], self.layout.num_levels, -1)
                cells = levels.swapaxes(1, 2).reshape(cells.shape)
            batch = rows_batch(cells.reshape(len(cells), -1), 1)
        return self._run(projector, batch)[patches.cell_order]

    def _pack(self, image: MediaPixels, views: list[Rows]) -> Rows:
        """Returns the rows of an image's views with newline rows."""
        newline = self._run(self.programs[NEWLINE], rows_batch(np.zeros_like(views[0][:1]), 1))
        if image.tiles == (0, 0):
            return np.concatenate([views[0], newline])
        side = image.width // self.layout.multiple
        packed = pack_rows(side, image.tiles, image.source, self.layout.max_tiles)
        return pack_views(views, image.tiles, packed, newline)

    def _run(self, program: Program, batch: StepBatch) -> Rows:
        runnable = self.runnables[program.name]
        num_blocks = get_num_blocks(batch) if program.groups else []
        kv = self.backend.allocate(runnable.kv_layouts, num_blocks)
        rows: Rows = runnable.run(batch, kv).arrays["rows"]
        return rows

    def close(self) -> None:
        self.backend.close()


def square_views(image: MediaPixels) -> list[MediaPixels]:
    """Returns the square views of an image with tiles; the image itself if it has none."""
    if image.tiles == (0, 0):
        return [image]
    side = image.width
    num_bytes = 3 * side * side
    return [
        MediaPixels(image.digest, side, side, image.data[start : start + num_bytes])
        for start in range(0, len(image.data), num_bytes)
    ]
