"""The media of an engine's steps: encodes them, caches their rows by digest, and adds them to
steps. The scheduler decides which media are cached (`engine/media.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import MediaContent, MediaItem, StepPlan
from octavo.worker.input_batch import InputBatch
from octavo.worker.media.patches import Rows
from octavo.worker.media.tower import Towers
from octavo.worker.model_input import ModelInput

logger = logging.getLogger(__name__)


class StepMedia:
    """Rows of encoded images. `num_axes`: axes of the decoder's positions."""

    def __init__(self, towers: Towers, rows: InputBatch, *, num_axes: int) -> None:
        self._towers = towers
        self._rows = rows
        self._num_axes = num_axes
        self._made: dict[bytes, Rows] = {}
        self._faults: dict[bytes, str] = {}
        self._dropping: list[bytes] = []
        """Images that the previous plan dropped. They are kept for one more plan, since an
        in-flight step may be recomputed.
        """

    def apply(self, plan: StepPlan) -> list[bytes]:
        """Drops and encodes a plan's images; returns the digests of images that could not be
        encoded.
        """
        for digest in self._dropping:
            self._made.pop(digest, None)
        self._dropping = list(plan.dropped_media)
        self._faults.clear()
        for image in plan.encodes:
            if image.digest in self._dropping:
                self._dropping.remove(image.digest)
            if image.digest not in self._made:
                self._encode(image)
        return list(self._faults)

    def _encode(self, image: MediaContent) -> None:
        try:
            self._made[image.digest] = self._towers.encode(image)
        except Exception as error:
            size = image.width, image.height
            logger.exception("%s of %d x %d cannot be encoded", image.kind, *size)
            self._faults[image.digest] = f"{type(error).__name__}: {error}"

    def add(self, model_input: ModelInput) -> None:
        """Adds the images of a step's requests to its arrays."""
        media_by_row = [
            (index, self._rows.media[row])
            for index, row in enumerate(model_input.rows.tolist())
            if row in self._rows.media
        ]
        if self._num_axes > 1:
            model_input.positions = np.repeat(model_input.key_indices[None], self._num_axes, axis=0)
        if not media_by_row:
            return
        image_rows: list[Rows] = []
        row_indices = np.full(len(model_input.key_indices), -1, np.int32)
        limits = model_input.key_indices + np.int32(1)
        for index, media in media_by_row:
            part = slice(
                int(model_input.query_starts[index]), int(model_input.query_starts[index + 1])
            )
            key_indices = model_input.key_indices[part]
            if self._num_axes > 1:
                model_input.positions[:, part] = get_positions(key_indices, media, self._num_axes)
            for item in media:
                if item.is_whole:
                    together = part.start + np.flatnonzero(
                        (key_indices >= item.start) & (key_indices < item.end)
                    )
                    limits[together] = np.maximum(limits[together], item.end)
                inside, at = find_rows(key_indices, item)
                if not len(inside):
                    continue
                token_indices = part.start + inside
                first = sum(map(len, image_rows))
                row_indices[token_indices] = first + np.arange(len(inside), dtype=np.int32)
                image_rows.append(self._get_rows(item)[at])
        if image_rows:
            model_input.input_rows, model_input.input_row_indices = (
                np.concatenate(image_rows),
                row_indices,
            )
        if (limits > model_input.key_indices + 1).any():
            model_input.limits = limits

    def _get_rows(self, item: MediaItem) -> Rows:
        if item.digest in self._faults:
            raise RuntimeError(f"a medium cannot be encoded: {self._faults[item.digest]}")
        return self._made[item.digest]

    @property
    def progress(self) -> int:
        """Counter that increases while an image is encoded; other threads may read it."""
        return self._towers.progress

    def close(self) -> None:
        self._towers.close()


def find_rows(
    key_indices: NDArray[np.int32], item: MediaItem
) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Returns which of the tokens at `key_indices` are rows of a medium, and which row each is."""
    if not item.is_encoded:
        return np.zeros(0, np.intp), np.zeros(0, np.int32)
    inside = np.flatnonzero((key_indices >= item.start) & (key_indices < item.end))
    index = key_indices[inside] - item.start
    if not item.line_tokens:
        return inside, index
    line, column = np.divmod(index, np.int32(item.line_tokens))
    is_row = column < item.line_tokens - 1
    return inside[is_row], (index - line)[is_row]


def get_positions(
    key_indices: NDArray[np.int32], media: Iterable[MediaItem], num_axes: int
) -> NDArray[np.int32]:
    """Returns the positions of tokens by time, row and column, `[num_axes, T]`: image tokens follow
    the image's grid, and text continues after the largest row or column (M-RoPE, Wang et al. 2024).
    """
    positions = np.repeat(key_indices[None], num_axes, axis=0)
    shift = start = 0
    for item in media:
        inside = np.flatnonzero((key_indices >= item.start) & (key_indices < item.end))
        index = key_indices[inside] - item.start
        start = start if item.joins else item.start + shift
        positions[0, inside] = start + item.time
        positions[1, inside] = start + index // item.grid[1]
        positions[2, inside] = start + index % item.grid[1]
        shift += (0 if item.joins else max(item.grid)) - item.num_tokens
        positions[:, key_indices >= item.end] = key_indices[key_indices >= item.end] + shift
    return positions
