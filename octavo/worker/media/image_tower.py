"""A model's tower: makes rows for the decoder of an image's pixels.

Each image is computed by itself, so that its rows depend on nothing else; the keys of its patches
live as long as that takes.
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
    num_blocks_of,
    patches_of,
    rows_batch,
    tower_batch,
)


@dataclass(frozen=True, slots=True)
class ImageTower:
    """The prepared Programs of a tower, and how an image becomes their rows."""

    layout: ImageLayout
    scale: PixelScale
    programs: dict[str, Program]
    runnables: dict[str, Runnable]
    backend: Backend
    """Backend that prepared them, with limits of its own."""

    def encode(self, image: MediaPixels) -> Rows:
        """Returns the decoder's rows of an image, row by row on it, `[num_tokens, W]`."""
        patches = patches_of(image, self.layout, self.scale)
        vision, projector = (self.programs[name] for name in TOWER)
        batch = tower_batch(patches, vision.groups)
        runnable = self.runnables[vision.name]
        kv = self.backend.allocate(runnable.kv_layouts, num_blocks_of(batch))
        rows = runnable.run(batch, kv).arrays["rows"]
        cell_rows = self.layout.cell**2
        if any(value.axis == "requests" for value in projector.outputs.values()):
            batch = rows_batch(rows, cell_rows)
        else:
            batch = rows_batch(rows.reshape(len(rows) // cell_rows, -1), 1)
        runnable = self.runnables[projector.name]
        kv = self.backend.allocate(runnable.kv_layouts, [])
        made = runnable.run(batch, kv).arrays["rows"][patches.cell_order]
        if not np.isfinite(made).all():
            raise ValueError("the tower's rows of an image hold what is not a number (NaN)")
        return np.ascontiguousarray(made)

    def close(self) -> None:
        self.backend.close()
