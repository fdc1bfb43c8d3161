"""Reads the audio of a prompt: decodes it, and computes its features (`features.py`) by windows,
each of which the tower computes by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.audio.audio_reader import decode_sound, resample_sound
from octavo.audio.log_mel import RATE
from octavo.engine.protocol.step import MediaContent, MediaItem
from octavo.media.features import SoundFeatures
from octavo.media.limits import ImageLimits, check_bytes, check_count
from octavo.media.sources import read_own_file, read_source
from octavo.text.ports import AudioSource, DecodedMedia

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAudioReader:
    """Reads audio for one model."""

    limits: ImageLimits
    features: SoundFeatures
    token_id: int
    """Placeholder token of an audio."""
    row_id: int
    """Token of each of its rows."""
    rows_per_token: int
    """Rows of the encoder that form one row of the decoder."""
    replacements: Mapping[str, str] = field(default_factory=dict)
    """Placeholder texts in a prompt and their replacements."""

    def read(self, sources: Sequence[Any]) -> list[DecodedMedia]:
        """Reads audio from `AudioSource`; raises InvalidRequest for an invalid one."""
        check_count(len(sources), self.limits)
        return [self._read(source) for source in sources]

    def _read(self, source: AudioSource | DecodedMedia) -> DecodedMedia:
        if isinstance(source, DecodedMedia):
            return source
        decoded = DecodedMedia([], [], [], kind="audio")
        for content in self._cut(self._get_samples(source.audio)):
            count = content.height // self.rows_per_token
            first = len(decoded.token_ids)
            decoded.media.append(MediaItem(content.digest, first, count, (1, count)))
            decoded.token_ids.extend([self.row_id] * count)
            decoded.pixels.append(content)
        return decoded

    def _get_samples(self, audio: Any) -> NDArray[np.float32]:
        """Returns the samples of an audio at 16 kHz."""
        rate = RATE
        if isinstance(audio, tuple) and len(audio) == 2:
            audio, rate = audio
        if isinstance(audio, np.ndarray):
            return self._resample(audio, rate)
        if isinstance(audio, str):
            data = read_source(audio, self.limits)
        elif isinstance(audio, Path):  # a server's clients cannot send these
            data = read_own_file(audio, self.limits)
        elif isinstance(audio, bytes):
            check_bytes(len(audio), self.limits)
            data = audio
        else:
            raise self.limits.error(
                f"got {type(audio).__name__}, expected bytes of a file, a path, an array of"
                " samples, (array, rate), or a string with a data URL",
                "read the file with soundfile.read",
            )
        return decode_sound(data, RATE, max_seconds=self.features.max_seconds, noun="audio")

    def _resample(self, samples: NDArray[Any], rate: object) -> NDArray[np.float32]:
        if samples.ndim != 1 or samples.dtype.kind != "f" or not len(samples):
            raise self.limits.error(
                f"got an array {samples.shape} of {samples.dtype}, expected samples [N] of float",
                "average the channels, and scale the samples to -1 to 1",
            )
        if isinstance(rate, bool) or not isinstance(rate, int | float | np.number) or rate <= 0:
            raise self.limits.error(f"got a rate of {rate!r}, expected Hz", "pass (array, 16000)")
        if not np.isfinite(samples).all():
            raise self.limits.error("its samples contain NaN or infinity", "check the array")
        return resample_sound(samples.astype(np.float32), float(rate), RATE)

    def _cut(self, samples: NDArray[np.float32]) -> Iterator[MediaContent]:
        """Yields the encoder's input of each window."""
        seconds, longest = len(samples) / RATE, self.features.max_seconds
        if seconds > longest:
            raise self.limits.error(
                f"got {seconds:.1f} s, expected at most {longest:.0f} s",
                "split the audio into several parts",
            )
        for window in self.features.windows(samples):
            if len(window) < self.rows_per_token:
                raise self.limits.error(
                    f"got {seconds:.3f} s, expected at least"
                    f" {self.rows_per_token * self.features.row_seconds} s",
                    "send more of the audio",
                )
            rows = window.astype("<f4")
            digest = blake2b(digest_size=DIGEST_BYTES, person=b"octavo audio")
            digest.update(struct.pack("<2Q", *rows.shape))
            digest.update(rows.tobytes())
            yield MediaContent(
                digest=digest.digest(),
                height=len(rows),
                width=rows.shape[1],
                data=rows.tobytes(),
                kind="audio",
            )
