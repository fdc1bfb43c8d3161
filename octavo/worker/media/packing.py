"""Packs the rows of an image's tiles without their padding, with a newline row after each line.

Source: `pack_image_features` of LLaVA-NeXT and LLaVA-OneVision in transformers 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.packed_image import PackedRows
from octavo.worker.media.patches import Rows


def pack_views(
    views: Sequence[Rows], tiles: tuple[int, int], packed: PackedRows, newline: Rows
) -> Rows:
    """Returns the rows of a view of the entire image and of the tiles, `[num_tokens, W]`.

    `views` are of `[side * side, W]` each, the entire image first; `newline` is `[1, W]`.
    """
    entire, *rest = views
    side, width = round(len(entire) ** 0.5), entire.shape[1]
    rows, columns = tiles
    grid = np.stack(rest).reshape((rows, columns, side, side, width))
    grid = grid.transpose((0, 2, 1, 3, 4)).reshape((rows * side, columns * side, width))
    grid = grid[packed.top :, packed.left :][: packed.height, : packed.width]
    grid = _scale(_scale(grid, 0, packed.scaled_height), 1, packed.scaled_width)
    ends = np.broadcast_to(newline, (len(grid), 1, width))
    lines = np.concatenate([grid, ends], axis=1).reshape((-1, width))
    return np.concatenate([entire, lines]).astype(entire.dtype, copy=False)


def _scale(grid: Rows, axis: int, size: int) -> Rows:
    """Scales one axis by linear interpolation, as `interpolate` of PyTorch."""
    count = grid.shape[axis]
    if count == size:
        return grid
    at = np.maximum((np.arange(size) + 0.5) * (count / size) - 0.5, 0.0)
    low = at.astype(np.intp)
    high = np.minimum(low + 1, count - 1)
    share: NDArray[np.floating] = (at - low).astype(grid.dtype)
    share = share.reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
    made: Rows = grid.take(low, axis) * (1 - share) + grid.take(high, axis) * share
    return made
