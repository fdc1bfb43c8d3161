"""The deltas of a stream: text, tokens and logprobs that an answer has gained since the last chunk,
and the parts of a message that the text makes sure of.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.outputs import CompletionOutput, Logprob
from octavo.server.reading import plain_parts
from octavo.text.parsers.parts import Part, PartKind
from octavo.text.parsers.reader import AnswerReader


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
    parts: list[Part] = field(default_factory=list)
    """Parts of the message that are new; some may come of earlier text."""
    has_calls: bool = False
    """Whether the answer has called a function by now."""


@dataclass(slots=True)
class Cursor:
    """Position in one sample up to which a stream has been sent."""

    num_chars: int = 0
    started: bool = False
    finished: bool = False
    reader: AnswerReader | None = None
    """Reads the text; None where all of it is content."""
    has_calls: bool = False

    def advance(self, gained: CompletionOutput, *, every_token: bool) -> Delta | None:
        """Returns the delta of a sample's gain; None where there is nothing to send.

        With `every_token`, tokens count even where they show no text yet.
        """
        if self.finished:
            return None
        self.finished = gained.finish_reason is not None
        parts = self._parts(gained.text)
        if not (parts or self.finished or (every_token and gained.token_ids)):
            return None
        start, is_first = self.num_chars, not self.started
        self.started = True
        self.num_chars += len(gained.text)
        return Delta(
            text=gained.text,
            start=start,
            token_ids=gained.token_ids,
            logprobs=gained.logprobs,
            finish_reason=gained.finish_reason,
            stop_reason=gained.stop_reason,
            is_first=is_first,
            score=gained.score,
            parts=parts,
            has_calls=self.has_calls,
        )

    def _parts(self, text: str) -> list[Part]:
        if self.reader is None:
            return plain_parts(text)
        parts = self.reader.read(text, finished=self.finished)
        self.has_calls = self.has_calls or any(part.kind is PartKind.CALL for part in parts)
        return parts
