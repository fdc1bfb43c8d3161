"""Formats logprobs: parallel lists for completions, a list of objects for chat."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any

from octavo.api.outputs import Logprob
from octavo.server.openai.protocol import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
)
from octavo.server.response_builder import ChoiceDelta
from octavo.text.detokenizer import get_unfinished_bytes
from octavo.text.ports import Tokenizer

Steps = Sequence[dict[int, Logprob] | None]
"""Logprobs by token id for each position: the sampled token first, then alternatives."""

FLOOR = -9999.0
"""Replaces minus infinity, which JSON lacks."""


class TokenNames:
    """Texts of tokens in responses, or "token_id:17" with `as_ids`."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_text(token_id)

    def unique_text(self, token_id: int) -> str:
        r"""Returns a text that distinguishes partial characters: "bytes:\\xe2\\x82"."""
        if self._as_ids or self._tokenizer is None:
            return self.text(token_id)
        content = self._tokenizer.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def bytes(self, token_id: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))


class TextOffsets:
    """Offsets of tokens in a choice's text, in characters; hidden tokens have no length."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        hidden_ids: Collection[int],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        """Offsets start at the beginning of the output's text. `prompt_token_ids` may end in a
        partial character.
        """
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        if tokenizer is not None:
            self._decoder.decode(get_unfinished_bytes(tokenizer, prompt_token_ids))
        self._position = 0

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Adds output tokens; returns their text offsets."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._position)
            if token_id not in self._hidden_ids:
                self._position += len(self._text_of(token_id))
        return offsets

    def add_echo(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Returns the offsets of prompt tokens in the echoed text, which may omit special tokens
        and a leading space.
        """
        offsets, position = [], 0
        for token_id in token_ids:
            offsets.append(position)
            piece = self._text_of(token_id)
            is_special = (
                self._tokenizer is not None and token_id in self._tokenizer.special_token_ids
            )
            if not text.startswith(piece, position):
                piece = "" if is_special else piece[piece.startswith(" ") :]
            position = min(len(text), position + len(piece))
        self._position = len(text)
        return offsets

    def _text_of(self, token_id: int) -> str:
        """Returns the characters that a token completes."""
        if self._tokenizer is None:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))


def completion_logprobs(
    token_ids: Sequence[int],
    steps: Steps,
    num_top: int,
    names: TokenNames,
    offsets: list[int],
) -> CompletionLogprobs:
    """Returns the logprobs of completions. A step is None for the first prompt token, which has no
    logprob.
    """
    logprobs = CompletionLogprobs(offsets, [], [], [])
    for token_id, step in zip(token_ids, steps, strict=True):
        text = names.unique_text(token_id)
        logprobs.tokens.append(text)
        logprobs.token_logprobs.append(None if step is None else _finite(step[token_id].logprob))
        logprobs.top_logprobs.append(
            None
            if step is None
            else {
                names.unique_text(other): _finite(entry.logprob)
                for other, entry in _top(step, token_id, num_top)
            }
        )
    return logprobs


def chat_logprobs(
    delta: ChoiceDelta, num_top: int | None, names: TokenNames
) -> ChatLogprobs | None:
    """Returns the logprobs of chat; None if they are not requested."""
    if num_top is None or delta.logprobs is None:
        return None
    content = []
    for token_id, step in zip(delta.token_ids, delta.logprobs, strict=True):
        top = [_token(other, entry, names) for other, entry in _rank(step)[:num_top]]
        own = _token(token_id, step[token_id], names)
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


def plain_logprobs(steps: Steps | None) -> list[dict[str, Any] | None] | None:
    """Returns prompt logprobs in vLLM's format; None if they are not requested."""
    if steps is None:
        return None
    return [
        None if step is None else {str(token_id): _plain(entry) for token_id, entry in step.items()}
        for step in steps
    ]


def _plain(entry: Logprob) -> dict[str, Any]:
    return {
        "logprob": _finite(entry.logprob),
        "rank": entry.rank,
        "decoded_token": entry.decoded_token,
    }


def _top(step: dict[int, Logprob], token_id: int, num_top: int) -> list[tuple[int, Logprob]]:
    """Returns the best alternatives, including the token itself."""
    best = _rank(step)[:num_top]
    return (
        best if any(other == token_id for other, _ in best) else [*best, (token_id, step[token_id])]
    )


def _rank(step: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(step.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))


def _token(token_id: int, entry: Logprob, names: TokenNames) -> TokenLogprob:
    return TokenLogprob(names.text(token_id), _finite(entry.logprob), names.bytes(token_id))


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
