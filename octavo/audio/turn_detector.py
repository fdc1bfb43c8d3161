"""Finds the turns of a speaker in audio that arrives piece by piece: each begins with speech and
ends in a pause.

Levels are compared as in `voice_activity.py`, with those of the last `HISTORY_S` seconds.
Independent of models.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.audio.voice_activity import FRAME_S, MIN_LEVEL_DB, MIN_RANGE_DB, get_levels

HISTORY_S = 30.0
"""Length of the audio whose levels tell background from speech, in seconds."""
LOUD_DB = -35.0
"""Level from which audio is speech while all levels are about equal, in dB."""
CHUNK_S = 0.1
"""Length of the audio that is processed at once, in seconds."""


class TurnEvent(NamedTuple):
    kind: Literal["started", "stopped"]
    sample: int
    """Index of the sample since the detector's start: the first one of the turn, or the one after
    its last.
    """


class TurnDetector:
    """Detects the turns in a stream of samples."""

    def __init__(
        self,
        rate: int,
        *,
        threshold: float,
        padding_s: float,
        silence_s: float,
        max_turn_s: float,
    ) -> None:
        """`threshold` is the fraction of the range of levels, from 0 to 1. A turn begins
        `padding_s` before its speech, ends after a pause of `silence_s`, and is at most
        `max_turn_s` long.
        """
        self._rate = rate
        self._threshold = threshold
        self._padding = round(padding_s * rate)
        self._silence = round(silence_s * rate)
        self._max_turn = round(max_turn_s * rate)
        self._chunk = round(CHUNK_S * rate)
        self._levels = np.zeros(0)
        self._rest = np.zeros(0, np.float32)
        self._num_samples = 0
        """Number of samples that were processed."""
        self._start: int | None = None
        """First sample of the turn; None between turns."""
        self._last_speech = 0
        self._earliest = 0
        """First sample that a turn may contain: the end of the turn before."""

    def add(self, samples: NDArray[np.float32]) -> list[TurnEvent]:
        """Returns the events of further samples `[N]` from -1 to 1; the last tenth of a second may
        be processed later.
        """
        events: list[TurnEvent] = []
        pending = np.concatenate([self._rest, samples])
        end = len(pending) // self._chunk * self._chunk
        for first in range(0, end, self._chunk):
            events += self._process(pending[first : first + self._chunk])
        self._rest = pending[end:]
        return events

    def end_turn(self) -> int:
        """Ends the turn at the last sample that was added; returns its index plus one."""
        end = self._num_samples + len(self._rest)
        self._start, self._earliest = None, end
        return end

    def _process(self, samples: NDArray[np.float32]) -> list[TurnEvent]:
        levels = get_levels(samples, self._rate)
        num_kept = round(HISTORY_S / FRAME_S)
        self._levels = np.concatenate([self._levels, levels])[-num_kept:]
        speaking = np.flatnonzero(levels >= self._get_threshold_db())
        first, frame = self._num_samples, round(FRAME_S * self._rate)
        self._num_samples += len(samples)
        events: list[TurnEvent] = []
        if len(speaking):
            self._last_speech = first + (int(speaking[-1]) + 1) * frame
            if self._start is None:
                begin = first + int(speaking[0]) * frame - self._padding
                self._start = max(begin, self._earliest)
                events.append(TurnEvent("started", self._start))
        if self._start is None:
            return events
        pause, length = self._num_samples - self._last_speech, self._num_samples - self._start
        if pause >= self._silence or length >= self._max_turn:
            self._start, self._earliest = None, self._num_samples
            events.append(TurnEvent("stopped", self._num_samples))
        return events

    def _get_threshold_db(self) -> float:
        """Returns the level from which a frame is speech, in dB."""
        background, loudest = np.percentile(self._levels, (10, 99))
        if loudest - background < MIN_RANGE_DB:
            return LOUD_DB
        return float(max(background + self._threshold * (loudest - background), MIN_LEVEL_DB))
