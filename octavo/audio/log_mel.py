"""Log-mel features of Whisper: mel-band power of 25 ms windows, 100 per second, in log10, clipped
to 8 below the maximum.

Radford et al. 2022, section 2.2; filters: Slaney 1998.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
"""Sampling rate in Hz."""
WINDOW = 400
"""Samples per window."""
HOP = 160
"""Samples between windows."""
TOP_HZ = 8_000.0
CHUNK_FRAMES = 3000
"""Windows that are transformed at once; bounds the memory of long audio."""
FLOOR, RANGE = 1e-10, 8.0
"""Power floor, and log10 range below the maximum."""
LINEAR_HZ = 200.0 / 3
"""Hz per mel in the linear part of Slaney's scale."""
LOG_HZ = 1000.0
LOG_MEL = 15.0
LOG_STEP = np.log(6.4) / 27
"""Log of the frequency ratio of one mel above `LOG_HZ`."""


@dataclass(frozen=True, slots=True)
class LogMel:
    """Log-mel features of fixed-length audio windows."""

    num_bands: int
    num_frames: int = 3000
    """Feature frames per window, 100 per second."""

    @property
    def num_samples(self) -> int:
        return self.num_frames * HOP

    def features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns features `[num_frames, num_bands]`; shorter input is padded with silence."""
        padded = np.zeros(self.num_samples)
        padded[: len(samples)] = samples
        around = np.pad(padded, WINDOW // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(around, WINDOW)[::HOP][: self.num_frames]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
        decades = np.empty((self.num_frames, self.num_bands))
        for start in range(0, self.num_frames, CHUNK_FRAMES):
            part = slice(start, start + CHUNK_FRAMES)
            power = np.abs(np.fft.rfft(frames[part] * hann, axis=1)) ** 2
            decades[part] = np.log10(np.maximum(power @ mel_filters(self.num_bands), FLOOR))
        clipped = np.maximum(decades, decades.max() - RANGE)
        features: NDArray[np.float32] = ((clipped + 4.0) / 4.0).astype(np.float32)
        return features


@cache
def mel_filters(num_bands: int) -> NDArray[np.float64]:
    """Returns triangular filters of area 1, `[WINDOW / 2 + 1, num_bands]`."""
    top = LOG_MEL + np.log(TOP_HZ / LOG_HZ) / LOG_STEP
    mels = np.linspace(0.0, top, num_bands + 2)
    edges = np.where(mels < LOG_MEL, LINEAR_HZ * mels, LOG_HZ * np.exp(LOG_STEP * (mels - LOG_MEL)))
    bins = np.linspace(0.0, RATE / 2, WINDOW // 2 + 1)
    return triangles(edges, bins) * (2.0 / (edges[2:] - edges[:-2]))


def triangles(edges: NDArray[np.float64], bins: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns triangular filters of height 1 between every third of `edges [B + 2]`, evaluated at
    `bins [N]`, in Hz: `[N, B]`.
    """
    at = bins[:, None]
    rising = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    filters: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return filters
