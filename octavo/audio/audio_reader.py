"""Encoder input for audio: decoded, resampled, cut into windows, and converted to log-mel frames.

Implements `frontend.transcription.Hearing` structurally.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.audio.decode import decode_sound
from octavo.audio.log_mel import RATE, LogMel

MAX_SECONDS = 2 * 3600.0
"""Longest audio of one request, in seconds."""
DIGEST_BYTES = 16


class AudioRows(NamedTuple):
    """Encoder input rows of one window."""

    digest: bytes
    rows: bytes
    num_rows: int


class AudioWindow(NamedTuple):
    samples: NDArray[np.float32]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class AudioReader:
    """Converts audio to encoder input for one model."""

    log_mel: LogMel
    max_seconds: float = MAX_SECONDS

    @property
    def window_s(self) -> float:
        """Length of a full window, in seconds."""
        return self.log_mel.num_samples / RATE

    def read(self, data: bytes) -> NDArray[np.float32]:
        """Decodes a file to 16 kHz samples; raises InvalidRequest if it is not audio."""
        return decode_sound(data, RATE, max_seconds=self.max_seconds)

    def window(self, samples: NDArray[np.float32], start_s: float) -> AudioWindow:
        first = round(start_s * RATE)
        part = samples[first : first + self.log_mel.num_samples]
        return AudioWindow(part, first / RATE, (first + len(part)) / RATE)

    def rows(self, window: AudioWindow) -> AudioRows:
        """Returns the encoder input of a window."""
        rows = convolved_rows(self.log_mel.features(window.samples)).astype("<f4")
        data = rows.tobytes()
        return AudioRows(blake2b(data, digest_size=DIGEST_BYTES).digest(), data, len(rows))


def convolved_rows(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """Gathers, for every second frame of `[F, B]`, the three 3-frame patches that the convolutions
    cover: `[F / 2, 3 * (3 * B + 1)]`.

    Each patch ends with a 1 (bias); a patch centered before the first frame is zero.
    """
    num_frames, num_bands = frames.shape
    padded = np.pad(frames, ((1, 1), (0, 0)))
    runs = np.zeros((num_frames + 1, 3 * num_bands + 1), np.float32)
    for tap in range(3):
        runs[1:, tap * num_bands : (tap + 1) * num_bands] = padded[tap : tap + num_frames]
    runs[1:, -1] = 1
    starts = np.arange(0, num_frames, 2)
    return np.concatenate([runs[starts + tap] for tap in range(3)], axis=1)
