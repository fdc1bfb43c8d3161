"""Log-mel features of speech, as Whisper takes them: power in mel bands of 25 ms windows, 100 a
second, in decades above the loudest less 8. Radford et al. 2022, section 2.2; filters: Slaney 1998.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

RATE = 16_000
"""Samples a second."""
WINDOW = 400
"""Samples of a window."""
HOP = 160
"""Samples from one window to the next."""
TOP_HZ = 8_000.0
FLOOR, RANGE = 1e-10, 8.0
"""Least power, and decades below the loudest that are kept."""
LINEAR_HZ = 200.0 / 3
"""Width of a mel of Slaney's scale in its linear part, in Hz."""
LOG_HZ = 1000.0
"""Frequency from which Slaney's scale is logarithmic, in Hz."""
LOG_MEL = 15.0
"""Mel of Slaney's scale at `LOG_HZ`."""
LOG_STEP = np.log(6.4) / 27
"""Logarithm of the ratio of two frequencies that lie one mel apart, above `LOG_HZ`."""


@dataclass(frozen=True, slots=True)
class LogMel:
    """Features of windows of sound of a fixed length."""

    num_bands: int
    num_frames: int = 3000
    """Rows of features of a window of sound, 100 a second."""

    @property
    def num_samples(self) -> int:
        """Samples of a window of sound."""
        return self.num_frames * HOP

    def features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns the features `[num_frames, num_bands]` of at most `num_samples` samples, silence
        behind them.
        """
        padded = np.zeros(self.num_samples)
        padded[: len(samples)] = samples
        around = np.pad(padded, WINDOW // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(around, WINDOW)[::HOP][: self.num_frames]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
        power = np.abs(np.fft.rfft(frames * hann, axis=1)) ** 2
        decades = np.log10(np.maximum(power @ mel_filters(self.num_bands), FLOOR))
        kept = np.maximum(decades, decades.max() - RANGE)
        features: NDArray[np.float32] = ((kept + 4.0) / 4.0).astype(np.float32)
        return features


@cache
def mel_filters(num_bands: int) -> NDArray[np.float64]:
    """Returns triangles of area 1 over the bins of a spectrum, `[WINDOW / 2 + 1, num_bands]`."""
    top = LOG_MEL + np.log(TOP_HZ / LOG_HZ) / LOG_STEP
    mels = np.linspace(0.0, top, num_bands + 2)
    edges = np.where(mels < LOG_MEL, LINEAR_HZ * mels, LOG_HZ * np.exp(LOG_STEP * (mels - LOG_MEL)))
    bins = np.linspace(0.0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    triangles: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return triangles * (2.0 / (edges[2:] - edges[:-2]))
