"""Features of audio, as a tower's input rows: those of Whisper and of USM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.audio.audio_reader import MAX_SECONDS, convolved_rows
from octavo.audio.log_mel import HOP, RATE, LogMel
from octavo.audio.usm_mel import strided_rows, usm_features


class SoundFeatures(Protocol):
    """Computes a tower's input rows from samples at 16 kHz."""

    @property
    def max_seconds(self) -> float:
        """Length of the longest audio."""
        ...

    @property
    def row_seconds(self) -> float:
        """Length of a row."""
        ...

    def windows(self, samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        """Yields the rows of each window, which the tower computes by itself."""
        ...


@dataclass(frozen=True, slots=True)
class WhisperFeatures:
    """Rows of two log-mel frames; see `convolved_rows`."""

    num_bands: int
    window_rows: int
    is_padded: bool
    """Whether audio is padded with silence to whole windows, of which it may have several; False:
    one window, whose silence at the end has no rows.
    """

    @property
    def row_seconds(self) -> float:
        return 2 * HOP / RATE

    @property
    def max_seconds(self) -> float:
        return MAX_SECONDS if self.is_padded else self.window_rows * self.row_seconds

    def windows(self, samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        num_frames, window_frames = -(-len(samples) // HOP), 2 * self.window_rows
        num_windows = max(1, -(-num_frames // window_frames))
        log_mel = LogMel(self.num_bands, num_windows * window_frames)
        frames = log_mel.features(samples).reshape(num_windows, window_frames, -1)
        count = self.window_rows if self.is_padded else math.ceil(num_frames / 2)
        for window in frames:
            yield convolved_rows(window)[:count]


@dataclass(frozen=True, slots=True)
class UsmFeatures:
    """Rows of four log-mel frames; see `strided_rows`. Silence at the end has no rows."""

    num_bands: int
    max_rows: int

    @property
    def row_seconds(self) -> float:
        return 4 * HOP / RATE

    @property
    def max_seconds(self) -> float:
        return self.max_rows * self.row_seconds

    def windows(self, samples: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
        yield strided_rows(usm_features(samples, self.num_bands))
