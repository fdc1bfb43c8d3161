"""Transcripts of audio, their subtitle formats, and options of transcriptions."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.api.errors import InvalidRequest, shown

MAX_PAUSE_MS = 10_000


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of audio and its text."""

    id: int
    start_s: float
    end_s: float
    text: str
    token_ids: list[int]
    seek_s: float = 0.0
    """Start of the window that contains it, in seconds."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word and when it is spoken."""

    word: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Transcription:
    """Transcript of an audio file."""

    text: str
    segments: list[Segment]
    language: str
    """Code of the spoken language."""
    duration_s: float
    task: str = "transcribe"
    words: list[Word] = field(default_factory=list)
    """Words with their times, if they were requested."""
    error: str | None = None
    """Reason why a window failed; None on success."""

    def srt(self) -> str:
        """Returns the segments as SubRip subtitles."""
        parts = [
            f"{segment.id + 1}\n{_clock(segment.start_s, ',')} --> {_clock(segment.end_s, ',')}\n"
            f"{segment.text}\n"
            for segment in self.segments
        ]
        return "\n".join(parts)

    def vtt(self) -> str:
        """Returns the segments as WebVTT subtitles."""
        parts = [
            f"{_clock(segment.start_s, '.')} --> {_clock(segment.end_s, '.')}\n{segment.text}\n"
            for segment in self.segments
        ]
        return "WEBVTT\n\n" + "\n".join(parts)


@dataclass(frozen=True, slots=True)
class VoiceActivity:
    """Options of voice activity detection, with OpenAI's names."""

    threshold: float = 0.5
    """Level above which audio is speech, as a fraction of the range from the background to the
    loudest speech, in dB."""
    prefix_padding_ms: int = 300
    """Audio before speech that belongs to it, in milliseconds."""
    silence_duration_ms: int = 200
    """Shortest pause that ends a part, in milliseconds."""

    def check(self, param: str = "chunking_strategy") -> None:
        """Raises InvalidRequest for a value out of range; `param` is the field of the request."""
        for name, value, most in (
            ("threshold", self.threshold, 1),
            ("prefix_padding_ms", self.prefix_padding_ms, MAX_PAUSE_MS),
            ("silence_duration_ms", self.silence_duration_ms, MAX_PAUSE_MS),
        ):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= most:
                raise InvalidRequest(
                    f"{param}: {name}: got {shown(value)}, expected a number from 0 to {most:,}",
                    param=param,
                )


def _clock(seconds: float, mark: str) -> str:
    """Formats a time as hours, minutes, seconds and milliseconds."""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
