"""Changes the rate of a sound: a windowed sinc at the new samples' times, cut at the lower rate's
half. Source: Smith, Digital Audio Resampling (bandlimited interpolation), with a Kaiser window.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

NUM_ZEROS = 32
"""Zero crossings of the sinc on either side."""
BETA = 9.0
"""Shape of the Kaiser window: side lobes below -90 dB."""
ROLLOFF = 0.945
"""Cut, as a share of the lower rate's half."""


def resample(samples: NDArray[np.float32], rate: int, new_rate: int) -> NDArray[np.float32]:
    """Returns `[N * new_rate / rate]` samples of the same sound."""
    if rate == new_rate:
        return samples
    common = math.gcd(rate, new_rate)
    up, down = new_rate // common, rate // common
    cut = ROLLOFF * min(1.0, new_rate / rate)
    reach = math.ceil(NUM_ZEROS / cut)
    num_new = -(-len(samples) * up // down)
    padded = np.pad(samples.astype(np.float64), (reach, reach + down))
    made = np.empty(num_new)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    # New samples `up` apart stand at the same place between two old ones.
    for phase in range(min(up, num_new)):
        first, within = divmod(phase * down, up)
        offsets = np.arange(-reach, reach + 1) - within / up
        taps = cut * np.sinc(cut * offsets) * _kaiser(offsets / (reach + 1))
        count = len(range(phase, num_new, up))
        made[phase::up] = windows[first : first + count * down : down][:count] @ taps
    return made.astype(np.float32)


def _kaiser(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.i0(BETA * np.sqrt(np.maximum(0.0, 1 - x * x))) / np.i0(BETA)
