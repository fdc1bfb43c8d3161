"""The rules by which a model of speech draws timestamps among the tokens of its text.

A logits processor of the engine's own (`logits_processors.py`). Timestamps come in pairs, never go
back, begin the text, and are drawn where they are together more likely than any word. Source:
Radford et al. 2022, and `WhisperTimeStampLogitsProcessor` of transformers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NEVER = np.float32(-np.inf)


class TimestampRules:
    """The rules of one model."""

    def __init__(
        self,
        start: int,
        prompt_tokens: int,
        end: int,
        no_timestamps: int,
        most_initial: int,
        *banned: int,
    ) -> None:
        """Takes the token that begins the last part of a prompt, the length of that part, the token
        that ends a text, the one that asks for no timestamps, whose next is 0 s, the most steps at
        which a text may begin (-1: any), and the tokens that are never drawn.
        """
        self._start = start
        self._prompt_tokens = prompt_tokens
        self._end = end
        self._no_timestamps = no_timestamps
        self._first = no_timestamps + 1
        self._most_initial = most_initial
        self._banned = list(banned)

    def __call__(self, token_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        """Takes out of the logits `[V]` what may not come next, in place."""
        first, behind = self._first, int(np.argmax(token_ids == self._start))
        drawn = token_ids[behind + self._prompt_tokens :]
        logits[[self._no_timestamps, *self._banned]] = NEVER
        if not len(drawn):
            logits[:first] = NEVER
            if self._most_initial >= 0:
                logits[first + self._most_initial + 1 :] = NEVER
            return
        is_time = drawn >= first
        before = bool(is_time[-2]) if len(drawn) > 1 else True
        if is_time[-1]:
            logits[first:] = NEVER if before else logits[first:]
            logits[: self._end] = logits[: self._end] if before else NEVER
        times = drawn[is_time]
        if len(times):
            opens = is_time[-1] and not before
            logits[first : int(times[-1]) + (0 if opens else 1)] = NEVER
        if _total(logits[first:]) > logits[:first].max():
            logits[:first] = NEVER


def _total(logits: NDArray[np.float32]) -> float:
    """Returns the logarithm of the sum of exponentials."""
    most = float(logits.max())
    if most == -np.inf:
        return most
    return most + float(np.log(np.exp(logits.astype(np.float64) - most).sum()))
