"""Encoder input for audio: decoded, resampled, cut into windows, and converted to log-mel frames.

Implements `frontend.transcription.AudioDecoder` structurally.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import InvalidRequest
from octavo.audio.log_mel import RATE, LogMel

if TYPE_CHECKING:
    from soundfile import SoundFile

FORMATS = ("WAV", "FLAC", "OGG", "MP3")
NAMES = {"WAVEX": "WAV", "RF64": "WAV", "MPEG": "MP3"}
"""libsndfile's names of format variants."""
MIN_RATE, MAX_RATE = 8_000, 48_000
BLOCK_FRAMES = 1 << 18
HINT = (
    "send a WAV, FLAC, OGG or MP3 file, for example made by"
    " `ffmpeg -i INPUT -ar 16000 -ac 1 speech.wav`"
)
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

    def window(
        self, samples: NDArray[np.float32], start_s: float, end_s: float | None = None
    ) -> AudioWindow:
        first = round(start_s * RATE)
        last = len(samples) if end_s is None else round(end_s * RATE)
        part = samples[first : min(first + self.log_mel.num_samples, last)]
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


def decode_sound(
    data: bytes, rate: int, *, max_seconds: float, noun: str = "file"
) -> NDArray[np.float32]:
    """Decodes a file to mono samples `[N]` from -1 to 1 at `rate` Hz.

    Raises InvalidRequest if it is not audio or longer than `max_seconds`; `noun` is what errors
    call the file.
    """
    try:
        return _decode(data, rate, max_seconds)
    except InvalidRequest as error:
        message = f"{noun}: {error.message.partition(': ')[2]}"
        raise InvalidRequest(message, hint=error.hint, param=noun) from error


def resample_sound(samples: NDArray[np.float32], rate: float, to: int) -> NDArray[np.float32]:
    """Converts samples `[N]` at `rate` Hz to `to` Hz."""
    if rate == to:
        return samples
    _, soxr = _import_decoders()
    resampled: NDArray[np.float32] = soxr.resample(samples, rate, to)
    return resampled


def _import_decoders() -> tuple[Any, Any]:
    """Returns the modules soundfile and soxr; raises InvalidRequest if they are not installed."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: no libsndfile on this platform
        raise _bad(
            "decoding audio requires soundfile and soxr, which are not installed",
            hint="install them on the engine's machine: pip install 'octavo[audio]'",
        ) from error
    return soundfile, soxr


def _decode(data: bytes, rate: int, max_seconds: float) -> NDArray[np.float32]:
    soundfile, soxr = _import_decoders()
    if not data:
        raise _bad("got an empty file")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_header(file, data, max_seconds)
            resampler = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
            parts = [resampler.resample_chunk(block) for block in _read_blocks(file, max_seconds)]
            parts.append(resampler.resample_chunk(np.empty(0, np.float32), last=True))
            return np.concatenate(parts)
    except soundfile.LibsndfileError as error:
        raise _bad(f"it cannot be read: {error.error_string}") from None


def _check_header(file: SoundFile, data: bytes, max_seconds: float) -> None:
    """Checks everything that the header reveals, before decoding."""
    kind = NAMES.get(file.format, file.format)
    if kind not in FORMATS:
        raise _bad(f"it is of format {kind}; expected {', '.join(FORMATS)}")
    if file.channels not in (1, 2):
        raise _bad(f"it has {file.channels} channels; expected 1 and 2")
    if not MIN_RATE <= file.samplerate <= MAX_RATE:
        raise _bad(f"it has {file.samplerate} samples a second; expected {MIN_RATE} to {MAX_RATE}")
    if data.startswith(b"RIFF"):
        (size,) = struct.unpack_from("<I", data, 4)
        # Programs that write to a pipe do not know the length and write the maximum.
        if len(data) < 8 + size < 0xFFFFFF00:
            raise _bad(f"it is truncated: its header declares {8 + size} bytes, got {len(data)}")
    _check_length(file.frames, file.samplerate, max_seconds)


def _check_length(num_frames: int, rate: int, max_seconds: float) -> None:
    if num_frames > max_seconds * rate:
        raise _bad(
            f"it is {num_frames / rate:.0f} s long; expected at most {max_seconds:.0f} s",
            hint="split the file",
        )


def _read_blocks(file: SoundFile, max_seconds: float) -> Iterator[NDArray[np.float32]]:
    """Yields blocks of mono samples."""
    num_frames = 0
    while len(block := file.read(BLOCK_FRAMES, dtype="float32", always_2d=True)):
        num_frames += len(block)
        _check_length(num_frames, file.samplerate, max_seconds)  # a header may not tell
        if not np.isfinite(block).all():
            raise _bad("its samples contain NaN or infinity")
        yield block.mean(axis=1, dtype=np.float32)
    if num_frames == 0:
        raise _bad("it has no samples")


def _bad(what: str, *, hint: str = HINT) -> InvalidRequest:
    return InvalidRequest(f"file: {what}", hint=hint, param="file")
