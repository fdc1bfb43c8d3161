"""The deltas of a stream: text, tokens and logprobs that an answer has gained since the last chunk.

Keeps counts only, no text.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.outputs import CompletionOutput, Logprob


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer, which begins at character `start` of its text."""

    text: str
    start: int
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    is_first: bool = True
    score: float | None = None


@dataclass(slots=True)
class Cursor:
    """Position in one sample up to which a stream has been sent."""

    num_chars: int = 0
    started: bool = False
    finished: bool = False

    def advance(self, gained: CompletionOutput, *, every_token: bool) -> Delta | None:
        """Returns the delta of a sample's gain; None where there is nothing to send.

        With `every_token`, tokens count even where they show no text yet.
        """
        if self.finished:
            return None
        self.finished = gained.finish_reason is not None
        if not (gained.text or self.finished or (every_token and gained.token_ids)):
            return None
        start, is_first = self.num_chars, not self.started
        self.started = True
        self.num_chars += len(gained.text)
        return Delta(
            gained.text,
            start,
            gained.token_ids,
            gained.logprobs,
            gained.finish_reason,
            gained.stop_reason,
            is_first,
            gained.score,
        )
