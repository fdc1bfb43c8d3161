"""A model's vision tower: encodes an image's pixels as rows of the decoder.

Each image is computed separately, so its rows depend only on its pixels. The keys of its patches
are kept only while it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.engine.protocol.step import MediaPixels
from octavo.executor.base import Backend, Runnable
from octavo.models.vision import TOWER, ImageLayout
from octavo.program.program import Program
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
        """Returns the decoder's rows of an image, in raster order, `[num_tokens, num_levels *
        W]`.
        """
        patches = cut_patches(image, self.layout, self.scale)
        vision, projector = (self.programs[name] for name in TOWER)
        batch = tower_batch(patches, vision.groups, has_class_row=self.layout.has_class_row)
        runnable = self.runnables[vision.name]
        kv = self.backend.allocate(runnable.kv_layouts, get_num_blocks(batch))
        rows = runnable.run(batch, kv).arrays["rows"]
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
        runnable = self.runnables[projector.name]
        kv = self.backend.allocate(runnable.kv_layouts, [])
        made = runnable.run(batch, kv).arrays["rows"][patches.cell_order]
        if not np.isfinite(made).all():
            raise ValueError("the tower's rows of an image contain NaN")
        return np.ascontiguousarray(made)

    def close(self) -> None:
        self.backend.close()
