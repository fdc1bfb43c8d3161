"""Transcripts of audio, and their subtitle formats."""

from __future__ import annotations

from dataclasses import dataclass


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
class Transcription:
    """Transcript of an audio file."""

    text: str
    segments: list[Segment]
    language: str
    """Code of the spoken language."""
    duration_s: float
    task: str = "transcribe"
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


def _clock(seconds: float, mark: str) -> str:
    """Formats a time as hours, minutes, seconds and milliseconds."""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"
