"""Incremental detokenization with stop strings.

Never emits partial UTF-8 characters. Constant work per token. The text continues the prompt: a
leading space that SentencePiece would drop is kept, and a character split between prompt and
completion is completed.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.api.sampling_params import SamplingParams
from octavo.api.stop_patterns import StopPattern
from octavo.text.answer_marks import AnswerMarks
from octavo.text.ports import Tokenizer

MAX_UNFINISHED_BYTES = 3
"""Maximum length of an incomplete UTF-8 sequence in bytes."""


class SpelledText:
    """The last characters of a text, including special tokens that are skipped in the output."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._shown = [True] * len(text)

    def add(self, piece: str, *, is_shown: bool) -> None:
        self.text += piece
        self._shown += [is_shown] * len(piece)

    def keep(self, length: int) -> None:
        """Keeps only the last characters."""
        start = max(0, len(self.text) - length)
        self.text, self._shown = self.text[start:], self._shown[start:]

    def num_shown_after(self, start: int) -> int:
        """Returns how many characters from `start` on are shown."""
        return sum(self._shown[start:])


class Detokenizer:
    """The text of one completion: `push` adds token ids; `text` returns all text, `delta`
    new text.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        """Starts the text after a prompt or a given prefix of output tokens."""
        self._tokenizer = tokenizer
        marks = params.answer_marks
        self._skipped = skipped_ids(tokenizer, params)
        self._watch = ReasoningWatch(marks) if marks and marks.reasoning_opening else None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begun = get_unfinished_bytes(tokenizer, prompt_token_ids)
        """Bytes of the prompt's incomplete last character, until the first output bytes."""
        self._stops = StopSearch(params) if params.ends_by_text else None
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._parts: list[str] = []
        self._length = 0
        self._num_tokens = 0
        self._recent = ""
        self._spelled: SpelledText | None = None
        """The last characters including skipped special tokens; only maintained if a stop string
        contains such a token.
        """
        self._given = 0
        self.num_reasoning_tokens = 0
        """Number of tokens up to the end of reasoning, including its markers."""
        self.stop: str | None = None
        """The stop string or pattern that ended the text."""

    def push(self, token_ids: Sequence[int]) -> str | None:
        """Adds token ids; returns the stop string if one matched. Later ids are dropped.

        A stop string cannot match within the first `min_tokens` tokens.
        """
        if self._stops is None and self._watch is None and not self._begun:
            shown = token_ids
            if not self._skipped.isdisjoint(token_ids):
                shown = [token_id for token_id in token_ids if token_id not in self._skipped]
            self._num_tokens += len(token_ids)
            self._add(self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, shown))))
            return self.stop
        for token_id in token_ids:
            if self.stop is not None:
                break
            self._num_tokens += 1
            if token_id not in self._skipped:
                new = self._tokenizer.token_bytes(token_id)
                if self._begun and new:
                    new = self._begun_with(new)
                self._add(self._decoder.decode(new))
            elif self._stops is not None:
                text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
                self._skip(self._stops, text)
            if self._watch is not None and self._watch.is_inside:
                self.num_reasoning_tokens = self._num_tokens
        return self.stop

    def _begun_with(self, first: bytes) -> bytes:
        """Prepends the prompt's incomplete character if the first bytes complete it."""
        begun, self._begun = self._begun, b""
        is_continuation = first[0] & 0xC0 == 0x80
        return begun + first if is_continuation else first

    def change_stops(self, params: SamplingParams) -> None:
        """Replaces the stop strings; a match may begin in earlier text."""
        self._stops = StopSearch(params) if params.ends_by_text else None
        num_kept = 0 if self._stops is None else self._stops.num_kept
        self._recent = self._tail(max(0, self._length - num_kept)) if num_kept else ""
        self._spelled = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens added; the last one completed the stop string, if any."""
        return self._num_tokens

    def text(self, *, finished: bool = True) -> str:
        """Returns the text so far.

        Until finished, holds back as many characters as the longest stop string has, minus one.
        """
        whole = self._whole()
        if finished:
            return whole + self._broken_bytes()
        return whole[: self._shown()]

    def delta(self, *, finished: bool = False) -> str:
        """Returns the text added since the last call; takes time proportional to its length."""
        end = self._length if finished else self._shown()
        new = self._tail(self._given)[: max(0, end - self._given)]
        self._given = max(self._given, end)
        return new + self._broken_bytes() if finished else new

    def _add(self, piece: str) -> None:
        """Adds a token's characters and searches for stop strings that end in them."""
        if not piece:
            return
        self._parts.append(piece)
        self._length += len(piece)
        if self._watch is not None and not self._watch.is_over:
            piece = self._answer_in(self._watch, piece)
        stops = self._stops
        if stops is None or not piece:
            return
        window = self._recent + piece
        if self._num_tokens > self._min_tokens:
            match = stops.first(window, len(self._recent))
            if match is not None:
                self.stop = match.stop
                self._cut(len(window) - (match.end if self._keeps_stop else match.start))
        if self._spelled is not None and self.stop is None:
            self._search_spelled(stops, self._spelled, piece, is_shown=True)
        self._recent = window[-stops.num_kept :] if stops.num_kept else ""

    def _skip(self, stops: StopSearch, token: str) -> None:
        """Searches for stop strings that contain a special token, which is not part of the text."""
        is_inside = self._watch is not None and self._watch.is_inside
        if is_inside or not stops.holds(token):
            return
        if self._spelled is None:
            self._spelled = SpelledText(self._recent)
        self._search_spelled(stops, self._spelled, token, is_shown=False)

    def _search_spelled(
        self, stops: StopSearch, spelled: SpelledText, piece: str, *, is_shown: bool
    ) -> None:
        num_old = len(spelled.text)
        spelled.add(piece, is_shown=is_shown)
        if self._num_tokens > self._min_tokens:
            match = stops.first_string(spelled.text, num_old)
            if match is not None:
                self.stop = match.stop
                self._cut(spelled.num_shown_after(match.start))
                if self._keeps_stop:
                    self._parts.append(match.stop)
                    self._length += len(match.stop)
        spelled.keep(stops.reach)

    def _answer_in(self, watch: ReasoningWatch, piece: str) -> str:
        """Returns the part of a token's characters that is outside of the reasoning, where stop
        strings apply.
        """
        outside = watch.add(piece)
        if watch.has_reasoned and watch.is_over:
            self.num_reasoning_tokens = self._num_tokens
        return outside

    def _cut(self, length: int) -> None:
        """Drops the last characters."""
        whole = self._whole()
        self._parts = [whole[: len(whole) - length]]
        self._length = len(self._parts[0])

    def _shown(self) -> int:
        """Returns how many characters may be shown so far."""
        if self._stops is None or self._keeps_stop or self.stop is not None:
            return self._length
        return max(0, self._length - self._stops.reach)

    def _broken_bytes(self) -> str:
        """Decodes the remaining incomplete character; empty after a stop string."""
        return "" if self.stop is not None else self._decoder.getstate()[0].decode(errors="replace")

    def _whole(self) -> str:
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def _tail(self, start: int) -> str:
        """Returns the characters from `start` on, using only the last parts."""
        pieces, missing = [], self._length - start
        for part in reversed(self._parts):
            if missing <= 0:
                break
            pieces.append(part[-missing:])
            missing -= len(part)
        return "".join(reversed(pieces))


def get_unfinished_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """Returns the bytes of an incomplete character at the end of a text."""
    tail = b""
    for token_id in reversed(token_ids):
        if token_id in tokenizer.special_token_ids or len(tail) >= MAX_UNFINISHED_BYTES:
            break
        tail = tokenizer.token_bytes(token_id) + tail
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


def decode_whole_characters(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """Decodes the first tokens of a text without a trailing incomplete character."""
    text = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    is_cut = bool(get_unfinished_bytes(tokenizer, token_ids))
    return text.removesuffix("\ufffd") if is_cut else text


def skipped_ids(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    """Returns the tokens that are skipped in a request's text."""
    if not params.skip_special_tokens:
        return frozenset()
    marks = params.answer_marks
    shown = marks.shown_token_ids if marks is not None else ()
    return tokenizer.special_token_ids.difference(shown) if shown else tokenizer.special_token_ids


class ReasoningWatch:
    """The state of one output: before, within or after its reasoning."""

    def __init__(self, marks: AnswerMarks) -> None:
        self._opening = marks.reasoning_opening
        self._closing = marks.reasoning_closing
        self._front = ""
        self._recent = ""
        self.is_inside = marks.begins_in_reasoning
        self.is_over = False
        self.has_reasoned = marks.begins_in_reasoning

    def add(self, text: str) -> str:
        """Adds text; returns the part that is known to be outside of reasoning."""
        if self.is_over:
            return text
        if not self.is_inside:
            self._front += text
            begun = self._front.lstrip()
            if self._opening.startswith(begun) and begun != self._opening:
                return ""
            if not begun.startswith(self._opening):
                self.is_over = True
                return self._front
            self.is_inside = self.has_reasoned = True
            text = begun[len(self._opening) :]
        self._recent += text
        start = self._recent.find(self._closing)
        if start < 0:
            self._recent = self._recent[-len(self._closing) :]
            return ""
        self.is_inside, self.is_over = False, True
        return self._recent[start + len(self._closing) :]


@dataclass(frozen=True, slots=True)
class FoundStop:
    """A match of a stop string or pattern, with positions in the searched text."""

    stop: str
    """The stop string or pattern."""
    start: int
    end: int


class StopSearch:
    """Stop strings and patterns of one request.

    Determines how far back a match may begin; the Detokenizer stores the text.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._strings = params.stop_strings
        self._patterns = [StopPattern(text) for text in params.stop_patterns]
        widths = [len(stop) for stop in self._strings]
        widths += [pattern.width for pattern in self._patterns]
        self.reach = max(widths, default=1) - 1
        """Number of characters before a new piece at which a match that ends in the piece may
        begin.
        """
        # `\b` and `^` examine one more character.
        self.num_kept = self.reach + 1 if self._patterns else self.reach
        """Number of last characters that the next search needs."""

    def first(self, text: str, num_old: int) -> FoundStop | None:
        """Returns the earliest match that ends after the first `num_old` characters; None if there
        is none.
        """
        return min(self._hits(text, num_old), key=lambda hit: hit.start, default=None)

    def holds(self, text: str) -> bool:
        """Returns whether a text is contained in a stop string."""
        return any(text in stop for stop in self._strings)

    def first_string(self, text: str, num_old: int) -> FoundStop | None:
        """Like `first`, for stop strings only."""
        return min(self._strings_in(text, num_old), key=lambda hit: hit.start, default=None)

    def _strings_in(self, text: str, num_old: int) -> Iterator[FoundStop]:
        for stop in self._strings:
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            if start >= 0:
                yield FoundStop(stop, start, start + len(stop))

    def _hits(self, text: str, num_old: int) -> Iterator[FoundStop]:
        yield from self._strings_in(text, num_old)
        for pattern in self._patterns:
            span = pattern.find(text, max(0, num_old + 1 - pattern.width), num_old + 1)
            if span is not None:
                yield FoundStop(pattern.text, *span)
