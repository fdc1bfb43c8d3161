"""What a stream adds: the difference between two looks at an answer that grows. Remembers counts only, no text."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.outputs import CompletionOutput, Logprob


@dataclass(frozen=True, slots=True)
class Delta:
    """`start` is where in the answer's text it begins."""

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
    """How much of one sample has been sent."""

    num_chars: int = 0
    num_tokens: int = 0
    started: bool = False
    finished: bool = False

    def advance(self, sample: CompletionOutput, *, every_token: bool) -> Delta | None:
        """What is new; None where that is nothing. `every_token`: tokens count though they show no text yet."""
        if self.finished:
            return None
        text, token_ids = sample.text[self.num_chars :], sample.token_ids[self.num_tokens :]
        self.finished = sample.finished()
        if not (text or self.finished or (every_token and token_ids)):
            return None
        logprobs = None if sample.logprobs is None else sample.logprobs[self.num_tokens :]
        delta = Delta(text, self.num_chars, token_ids, logprobs, sample.finish_reason, sample.stop_reason, is_first=not self.started)
        self.started = True
        self.num_chars, self.num_tokens = len(sample.text), len(sample.token_ids)
        return delta
