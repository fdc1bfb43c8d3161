"""Cuts images into patches for a vision tower, and builds the step that encodes them.

Independent of the tower's ops. Source of the orders: the image processors and towers of
transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import MediaContent
from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.models.vision import WINDOW, ImageLayout
from octavo.program.program import CacheGroup

Rows = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class PixelScale:
    """Normalization of pixels: (pixel * factor - mean) / std, per color."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def apply(self, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Normalizes pixels `[..., colors]`, rounded as in transformers."""
        scaled = (pixels.astype(np.float64) * self.factor).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        made: NDArray[np.float32] = (scaled - mean) / std
        return made


@dataclass(frozen=True, slots=True)
class Patches:
    """An image's patches in the order of a tower's rows."""

    rows: NDArray[np.float32]
    """Pixels of each patch: colors, frames, rows, columns, `[T, ...]`; then the weights of
    interpolated position embeddings, if the layout has them."""
    positions: NDArray[np.int32]
    """Positions of each patch, `[P, T]`."""
    window_starts: NDArray[np.int32]
    """First patch of each window, `[R+1]`; a single window if the tower has none."""
    cell_order: NDArray[np.intp]
    """For each cell in raster order, its index in the tower's order."""


def cut_patches(image: MediaContent, layout: ImageLayout, scale: PixelScale) -> Patches:
    """Cuts an image into patches: cell by cell, and window by window if the layout has windows."""
    frames = np.frombuffer(image.data, np.uint8).reshape(
        image.num_frames, image.height, image.width, -1
    )
    rows, columns = layout.get_grid(image.height, image.width)
    order, counts = _windows(rows, columns, layout.window)
    size, cell = layout.patch_size, layout.cell
    frames = frames[:, : rows * layout.multiple, : columns * layout.multiple]
    cut = scale.apply(frames).reshape((len(frames), rows, cell, size, columns, cell, size, -1))
    by_cell = cut.transpose((1, 4, 2, 5, 7, 0, 3, 6))  # cells, patches, colors, frames, pixels
    num_colours = by_cell.shape[4]
    flat = by_cell.reshape((rows * columns, cell * cell, num_colours, len(frames), size, size))
    whole = np.broadcast_to(flat[order], (*flat.shape[:3], layout.num_frames, size, size))
    num_patches = rows * columns * cell * cell
    ends = np.cumsum([0, *counts]) * cell * cell
    positions = _positions(rows, columns, layout)[:, order].reshape(-1, num_patches)
    if layout.colors_last:
        whole = whole.transpose((0, 1, 3, 4, 5, 2))
    parts = [whole.reshape(num_patches, -1)]
    if layout.table_side is not None:
        taps, weights = _taps(positions, rows * cell, columns * cell, layout.table_side)
        positions = np.concatenate((positions, taps))
        parts.append(weights.T)
    return Patches(
        np.ascontiguousarray(np.concatenate(parts, axis=1)),
        positions,
        ends.astype(np.int32),
        np.argsort(order),
    )


def _taps(
    positions: NDArray[np.int32], num_rows: int, num_columns: int, side: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Returns the rows of a `side` x `side` table that are interpolated for each patch, and their
    weights, both `[TAPS, T]`: bilinear with aligned corners, rounded as in transformers.
    """
    axes, one = [], np.float32(1)
    for at, size in zip(positions, (num_rows, num_columns), strict=True):
        position = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        low = np.floor(position)
        index = low.astype(np.int32)
        share = position - low
        pair = (index, np.minimum(index + 1, side - 1))
        axes.append((pair, (one - share, one - (one - share))))
    (by_row, row_shares), (by_column, column_shares) = axes
    taps = [row * side + column for row in by_row for column in by_column]
    weights = [row * column for row in row_shares for column in column_shares]
    return np.stack(taps), np.stack(weights)


def _windows(rows: int, columns: int, window: int | None) -> tuple[NDArray[np.intp], list[int]]:
    """Returns the cells in window order, and the number of cells of each window."""
    cells = np.arange(rows * columns).reshape(rows, columns)
    if window is None:
        return cells.reshape(-1), [cells.size]
    parts = [
        cells[top : top + window, left : left + window].reshape(-1)
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    return np.concatenate(parts), [len(part) for part in parts]


def _positions(rows: int, columns: int, layout: ImageLayout) -> NDArray[np.int32]:
    """Returns the positions of each cell's patches, `[P, cells, patches of a cell]`."""
    cell = layout.cell
    across, down = np.meshgrid(np.arange(columns * cell), np.arange(rows * cell))
    axes = [down, across] if layout.has_grid_positions else [down * columns * cell + across]
    by_cell = np.stack(axes).reshape((-1, rows, cell, columns, cell)).transpose((0, 1, 3, 2, 4))
    return by_cell.reshape(len(axes), rows * columns, cell * cell).astype(np.int32)


def tower_batch(
    patches: Patches, groups: tuple[CacheGroup, ...], *, has_class_row: bool = False
) -> StepBatch:
    """Returns the step over all patches, after a class row at position 0 if the tower has one. Each
    window is a request; in groups that span the complete image, all windows read the same blocks.
    """
    num_extra = int(has_class_row)
    starts, count = patches.window_starts.copy(), len(patches.rows) + num_extra
    starts[1:] += num_extra
    lengths = np.diff(starts)
    key_indices = np.arange(count, dtype=np.int32)
    tables, slots, contexts = [], [], []
    for group in groups:
        if group.name == WINDOW:
            num_blocks = -(-lengths // BLOCK_SIZE)
            firsts = np.cumsum([0, *num_blocks])[:-1]
            within = key_indices - starts[:-1].repeat(lengths)
            slots.append(firsts.repeat(lengths) * BLOCK_SIZE + within)
            tables.append([range(a, a + n) for a, n in zip(firsts, num_blocks, strict=True)])
            contexts.append(lengths)
        else:
            slots.append(key_indices)
            tables.append([range(-(-count // BLOCK_SIZE))] * len(lengths))
            contexts.append(np.full(len(lengths), count))
    num = len(lengths)
    return StepBatch(
        token_ids=np.zeros(count, np.int32),
        key_indices=key_indices,
        positions=np.ascontiguousarray(
            np.pad(patches.positions + num_extra, ((0, 0), (num_extra, 0)))
        ),
        query_starts=starts,
        context_lens=np.array(contexts, np.int32).reshape(len(groups), num),
        slots=np.array(slots, np.int32).reshape(len(groups), count),
        block_tables=_pad(tables, num),
        sample_rows=key_indices[num_extra:],
        input_rows=patches.rows,
        input_row_indices=key_indices - num_extra,
    )


def get_num_blocks(batch: StepBatch) -> list[int]:
    """Returns how many blocks of each group a step writes."""
    return [int(table.max(initial=-1)) + 1 for table in batch.block_tables]


def rows_batch(rows: Rows, rows_per_request: int) -> StepBatch:
    """Returns a step without keys over input rows, `rows_per_request` in each request."""
    count = len(rows)
    starts = np.arange(0, count + 1, rows_per_request, dtype=np.int32)
    num = len(starts) - 1
    at = np.arange(count, dtype=np.int32)
    return StepBatch(
        token_ids=np.zeros(count, np.int32),
        key_indices=np.zeros(count, np.int32),
        positions=np.zeros((1, count), np.int32),
        query_starts=starts,
        context_lens=np.zeros((0, num), np.int32),
        slots=np.zeros((0, count), np.int32),
        block_tables=np.zeros((0, num, 1), np.int32),
        sample_rows=at,
        input_rows=rows,
        input_row_indices=at,
    )


def _pad(tables: list[list[range]], num_requests: int) -> NDArray[np.int32]:
    width = max((len(row) for table in tables for row in table), default=1)
    padded = np.full((len(tables), num_requests, width), -1, np.int32)
    for group, table in enumerate(tables):
        for request, row in enumerate(table):
            padded[group, request, : len(row)] = row
    return padded
