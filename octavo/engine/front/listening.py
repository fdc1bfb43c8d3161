"""The reading of a sound, window by window, into one text.

Without timestamps a sound's windows follow each other without a gap, and may be computed together.
With them a window begins where the last one's text ends, so that no word is cut. Source: Radford et
al. 2022, section 3.8, and `transcribe` of OpenAI's whisper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.engine.front.transcriptions import (
    HeardSound,
    SoundWindow,
    SpeechOptions,
    Transcriptions,
)
from octavo.outputs import RequestOutput
from octavo.transcription import Segment, Transcription

MOST_WINDOWS = 16
"""Windows that are computed together: their inputs are in memory at once."""
LEAST_S = 0.01
"""Shortest rest of a sound that is a window, in seconds: a frame."""
WINDOWS_A_LENGTH, SPARE_WINDOWS = 4, 16
"""Windows that a sound may have for each that it is long, and beside them; from then on they follow
each other without a gap, so that a text that barely moves on ends.
"""


class CutAnswer(NamedTuple):
    """The answer to a window, cut at its timestamps, in steps from the window's beginning."""

    spans: list[tuple[int, int, list[int]]]
    """First and last step of each segment, and its tokens of text."""
    num_steps: int
    """Steps from the window's beginning to the next one's."""


def cut_at_times(token_ids: Sequence[int], first: int, num_steps: int) -> CutAnswer:
    """Cuts a window's tokens at its timestamps, of which `first` stands for step 0; the window is
    `num_steps` long.

    Segments end where two timestamps follow each other. What comes behind the last of them is heard
    again in the next window, which begins there, unless a timestamp ends it: then nothing is said
    behind it.
    """
    is_time = [token >= first for token in token_ids]
    cuts = [i for i in range(1, len(token_ids)) if is_time[i - 1] and is_time[i]]
    ends_alone = is_time[-2:] == [False, True]
    if not cuts:
        times = [token - first for token in token_ids if token >= first]
        last = times[-1] if times and times[-1] else num_steps
        return CutAnswer([(0, last, [t for t in token_ids if t < first])], num_steps)
    if ends_alone:
        cuts.append(len(token_ids))
    spans = [
        (piece[0] - first, piece[-1] - first, [token for token in piece if token < first])
        for start, end in zip([0, *cuts], cuts, strict=False)
        for piece in [token_ids[start:end]]
    ]
    return CutAnswer(spans, num_steps if ends_alone else token_ids[cuts[-1] - 1] - first)


@dataclass(slots=True)
class Listening:
    """One sound on its way to a text."""

    speech: Transcriptions
    sound: HeardSound
    options: SpeechOptions
    _segments: list[Segment] = field(default_factory=list)
    _step: int = 0
    """Step at which the next window begins."""
    _num_windows: int = 0
    _error: str | None = None

    @property
    def _steps_a_window(self) -> int:
        return self.speech.tokens.num_timestamps - 1 if self.options.timestamps else 1

    @property
    def _step_s(self) -> float:
        return self.speech.hearing.window_s / self._steps_a_window

    def windows(self, most: int) -> list[SoundWindow]:
        """Returns up to `most` windows that can be computed now; none at the end."""
        if self._error is not None:
            return []
        left_s = self.sound.duration_s - self._step * self._step_s
        if left_s < LEAST_S and self._num_windows:
            return []
        count = min(most, 1 if self.options.timestamps else math.ceil(left_s / self._step_s))
        starts = (self._step + i * self._steps_a_window for i in range(count))
        return [self.sound.window(step * self._step_s) for step in starts]

    def take(self, window: SoundWindow, output: RequestOutput) -> None:
        """Takes in the answer to the next window."""
        self._num_windows += 1
        answer = output.outputs[0]
        if output.error is not None:
            self._error = output.error
            return
        if not self.options.timestamps:
            self._step += 1
            self._add(window, (window.start_s, window.end_s), list(answer.token_ids), answer.text)
            return
        tokens = self.speech.tokens
        drawn = [token for token in answer.token_ids if token not in tokens.ends]
        cut = cut_at_times(drawn, tokens.first_timestamp, self._steps_a_window)
        for first, last, words in cut.spans:
            start_s = min(window.start_s + first * self._step_s, window.end_s)
            end_s = min(window.start_s + last * self._step_s, window.end_s)
            if words and start_s < end_s:
                self._add(window, (start_s, end_s), words, self.speech.text_of(words))
        self._step += cut.num_steps if self._may_overlap(cut) else self._steps_a_window

    def _may_overlap(self, cut: CutAnswer) -> bool:
        """Whether the next window may begin before this one's end."""
        lengths = math.ceil(self.sound.duration_s / self.speech.hearing.window_s)
        return cut.num_steps > 0 and self._num_windows < WINDOWS_A_LENGTH * lengths + SPARE_WINDOWS

    def _add(
        self, window: SoundWindow, span_s: tuple[float, float], words: list[int], text: str
    ) -> None:
        start_s, end_s = (round(time_s, 3) for time_s in span_s)
        index, seek_s = len(self._segments), round(window.start_s, 3)
        self._segments.append(Segment(index, start_s, end_s, text.strip(), words, seek_s))

    def result(self) -> Transcription:
        """Returns the text of the sound, with an error where one of its windows has failed."""
        return Transcription(
            text=" ".join(segment.text for segment in self._segments if segment.text),
            segments=self._segments,
            language=self.options.language or "en",
            duration_s=self.sound.duration_s,
            task=self.options.task,
            error=self._error,
        )


def next_windows(listenings: Sequence[Listening]) -> list[tuple[Listening, SoundWindow]]:
    """Returns the windows of several sounds that are computed next; none once all are texts."""
    found: list[tuple[Listening, SoundWindow]] = []
    for one in listenings:
        found += ((one, window) for window in one.windows(MOST_WINDOWS - len(found)))
        if len(found) >= MOST_WINDOWS:
            break
    return found
