"""Timestamp rules of Whisper-like speech models, as a built-in logits processor.

Timestamps come in pairs, never decrease, and begin the text. A timestamp is forced if the total
probability of timestamps exceeds that of every text token. Source: Radford et al. 2022, and
`WhisperTimeStampLogitsProcessor` of transformers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NEVER = np.float32(-np.inf)


class TimestampRules:
    def __init__(
        self,
        start: int,
        prompt_tokens: int,
        end: int,
        no_timestamps: int,
        max_initial: int,
        *banned: int,
    ) -> None:
        """`start`: token that begins the last part of a prompt, which has `prompt_tokens` tokens.
        `end`: token that ends a text. `no_timestamps`: token before the timestamp 0 s.
        `max_initial`: largest initial timestamp in steps (-1: no limit). `banned`: tokens that are
        never sampled.
        """
        self._start = start
        self._prompt_tokens = prompt_tokens
        self._end = end
        self._no_timestamps = no_timestamps
        self._first = no_timestamps + 1
        self._max_initial = max_initial
        self._banned = list(banned)

    def __call__(self, token_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        """Bans the tokens that must not come next in the logits `[V]`, in place."""
        first, generated = self._first, int(np.argmax(token_ids == self._start))
        sampled = token_ids[generated + self._prompt_tokens :]
        logits[[self._no_timestamps, *self._banned]] = NEVER
        if not len(sampled):
            logits[:first] = NEVER
            if self._max_initial >= 0:
                logits[first + self._max_initial + 1 :] = NEVER
            return
        is_time = sampled >= first
        before = bool(is_time[-2]) if len(sampled) > 1 else True
        if is_time[-1]:
            logits[first:] = NEVER if before else logits[first:]
            logits[: self._end] = logits[: self._end] if before else NEVER
        times = sampled[is_time]
        if len(times):
            opens = is_time[-1] and not before
            logits[first : int(times[-1]) + (0 if opens else 1)] = NEVER
        if _logsumexp(logits[first:]) > logits[:first].max():
            logits[:first] = NEVER


def _logsumexp(logits: NDArray[np.float32]) -> float:
    largest = float(logits.max())
    if largest == -np.inf:
        return largest
    return largest + float(np.log(np.exp(logits.astype(np.float64) - largest).sum()))
