"""Writes samples as a WAV file."""

from __future__ import annotations

import io
import wave

import numpy as np
from numpy.typing import NDArray


def make_wav(samples: NDArray[np.float32], rate: int) -> bytes:
    """Returns a 16-bit mono file of samples `[N]` from -1 to 1 at `rate` Hz."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.clip(samples * 32_768, -32_768, 32_767).astype("<i2").tobytes())
    return out.getvalue()
