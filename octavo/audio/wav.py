"""Reads WAV files: PCM of 8, 16, 24 and 32 bits and floats of 32 and 64, of one or two channels.

Every number of the header is checked before a sample is read; InvalidAudio says what to do. Source:
Microsoft's Multimedia Programming Interface 1.0 and its WAVE_FORMAT_EXTENSIBLE.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.errors import InvalidRequest

MIN_RATE, MAX_RATE = 8_000, 48_000
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
HINT = "send a WAV file, as `ffmpeg -i INPUT -ar 16000 -ac 1 speech.wav` makes it"


class Sound(NamedTuple):
    """One channel of sound."""

    samples: NDArray[np.float32]
    """Samples from -1 to 1, `[N]`."""
    rate: int
    """Samples a second."""

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


@dataclass(frozen=True, slots=True)
class _Format:
    kind: int
    num_channels: int
    rate: int
    bits: int


def read_wav(data: bytes, *, max_seconds: float) -> Sound:
    """Returns a file's sound, its channels averaged; InvalidRequest where it is none, or longer
    than `max_seconds`.
    """
    if not data:
        raise _bad("got an empty file")
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise _bad("got a file that is no WAV (it does not begin with RIFF and WAVE)")
    layout: _Format | None = None
    place = 12
    while place + 8 <= len(data):
        name, size = data[place : place + 4], struct.unpack_from("<I", data, place + 4)[0]
        body = place + 8
        if name == b"fmt ":
            layout = _read_format(data[body : body + size])
        elif name == b"data":
            if layout is None:
                raise _bad("its samples come before their format (fmt)")
            # Writers to a pipe do not know the length, and give the largest.
            if body + size > len(data) and size < 0xFFFFFF00:
                raise _bad(
                    f"it is cut off: its header names {size} bytes of samples, there are"
                    f" {len(data) - body}"
                )
            return _sound(data[body : body + size], layout, max_seconds)
        place = body + size + size % 2
    raise _bad("it is cut off: it has no samples (data)")


def _read_format(body: bytes) -> _Format:
    if len(body) < 16:
        raise _bad("it is cut off within its format (fmt)")
    kind, num_channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", body)
    if kind == EXTENSIBLE and len(body) >= 26:
        kind = struct.unpack_from("<H", body, 24)[0]
    if (kind, bits) not in {(PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)}:
        raise _bad(
            f"its samples are of format {kind} with {bits} bits; allowed are PCM of 8, 16, 24 and"
            " 32 bits and floats of 32 and 64"
        )
    if num_channels not in (1, 2):
        raise _bad(f"it has {num_channels} channels; allowed are 1 and 2")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise _bad(f"it has {rate} samples a second; allowed are {MIN_RATE} to {MAX_RATE}")
    return _Format(kind, num_channels, rate, bits)


def _sound(body: bytes, layout: _Format, max_seconds: float) -> Sound:
    frame_bytes = layout.num_channels * layout.bits // 8
    num_frames = len(body) // frame_bytes
    seconds = num_frames / layout.rate
    if num_frames == 0:
        raise _bad("it has no samples")
    if seconds > max_seconds:
        raise _bad(
            f"it is {seconds:.0f} s long; allowed are at most {max_seconds:.0f} s",
            hint="send it in parts",
        )
    samples = _as_floats(body[: num_frames * frame_bytes], layout)
    if not np.isfinite(samples).all():
        raise _bad("its samples hold what is not a number (NaN or infinity)")
    mono = samples.reshape(num_frames, layout.num_channels).mean(axis=1, dtype=np.float64)
    return Sound(mono.astype(np.float32), layout.rate)


def _as_floats(body: bytes, layout: _Format) -> NDArray[np.float64]:
    """Returns samples from -1 to 1."""
    if layout.kind == FLOAT:
        return np.frombuffer(body, f"<f{layout.bits // 8}").astype(np.float64)
    if layout.bits == 8:
        return (np.frombuffer(body, np.uint8).astype(np.float64) - 128) / 128
    if layout.bits == 24:
        low = np.frombuffer(body, np.uint8).reshape(-1, 3).astype(np.int32)
        values = low[:, 0] | low[:, 1] << 8 | low[:, 2] << 16
        return ((values ^ 0x800000) - 0x800000).astype(np.float64) / (1 << 23)
    values = np.frombuffer(body, f"<i{layout.bits // 8}")
    return values.astype(np.float64) / (1 << (layout.bits - 1))


def _bad(what: str, *, hint: str = HINT) -> InvalidRequest:
    return InvalidRequest(f"file: {what}", hint=hint, param="file")
