"""Log-mel features of USM, as Gemma 4 reads them: the log of mel-band magnitudes of 20 ms windows,
100 per second.

Zhang et al. 2023; the scale is HTK's (Young et al. 2006).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from octavo.audio.log_mel import CHUNK_FRAMES, HOP, RATE, TOP_HZ, triangles

WINDOW = 320
"""Samples per window; the first one is centered at the first sample."""
FFT_SAMPLES = 512
FLOOR = 1e-3
"""Magnitude that is added to each band."""
HTK_FACTOR, HTK_HZ = 2595.0, 700.0
"""Mels per decade, and Hz at which the scale turns from linear to logarithmic."""


def usm_features(samples: NDArray[np.float32], num_bands: int) -> NDArray[np.float32]:
    """Returns the features `[F, num_bands]` of all windows within samples at 16 kHz."""
    padded = np.concatenate([np.zeros(WINDOW // 2), samples.astype(np.float64)])
    num_frames = max(0, -(-len(samples) // HOP) - 1)
    features = np.empty((num_frames, num_bands), np.float32)
    if not num_frames:
        return features
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:num_frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    for start in range(0, num_frames, CHUNK_FRAMES):
        part = slice(start, start + CHUNK_FRAMES)
        magnitude = np.abs(np.fft.rfft(frames[part] * hann, FFT_SAMPLES, axis=1))
        features[part] = np.log(magnitude @ _filters(num_bands) + FLOOR)
    return features


@cache
def _filters(num_bands: int) -> NDArray[np.float64]:
    """Returns triangular filters of height 1, `[FFT_SAMPLES / 2 + 1, num_bands]`."""
    top = HTK_FACTOR * np.log10(1 + TOP_HZ / HTK_HZ)
    mels = np.linspace(0.0, top, num_bands + 2)
    edges = HTK_HZ * (10 ** (mels / HTK_FACTOR) - 1)
    return triangles(edges, np.linspace(0.0, RATE / 2, FFT_SAMPLES // 2 + 1))


def strided_rows(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """Gathers, for every fourth frame of `[F, B]`, the three runs of three frames that two strided
    convolutions cover, `[ceil(F / 4), 9 * B]`; a run centered outside of the frames is zero.
    """
    num_frames, num_bands = frames.shape
    centers = np.arange(0, num_frames, 4)[:, None] + np.array([-2, 0, 2])
    padded = np.pad(frames, ((3, 5), (0, 0)))
    runs = padded[centers[:, :, None] + 3 + np.array([-1, 0, 1])]
    runs[(centers < 0) | (centers >= num_frames)] = 0
    rows: NDArray[np.float32] = runs.reshape(len(centers), 9 * num_bands)
    return rows
