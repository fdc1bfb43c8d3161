"""The tokens at which a repetition ends for DRY: those whose bytes hold one of a request's
sequence breakers.

Keeps what it found for the last few lists of texts, since a look at a whole vocabulary takes some
ten milliseconds. Any thread may call it.
"""

from __future__ import annotations

from functools import lru_cache

from octavo.errors import InvalidRequest
from octavo.prompt_ports import Tokenizer
from octavo.text.unicode import check_unicode

NAME = "dry_sequence_breakers"

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""Breakers where a request names none; those of llama.cpp."""
MAX_KEPT = 16
"""Lists of breakers whose tokens are kept."""


class Breakers:
    """Finds the tokens of sequence breakers in one vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._found = lru_cache(maxsize=MAX_KEPT)(self._find)

    def ids(self, texts: list[str] | None) -> list[int]:
        """Returns the tokens that hold one of `texts`; None stands for the default ones, which are
        none where there is no tokenizer.
        """
        if self._tokenizer is None and texts:
            raise InvalidRequest(
                f"{NAME}: texts need a tokenizer, and this engine has none", param=NAME
            )
        for text in texts or ():
            check_unicode(text, NAME)
        parts = DEFAULT_BREAKERS if texts is None else tuple(dict.fromkeys(texts))
        return list(self._found(parts))

    def _find(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        wanted = [text.encode() for text in texts]
        if self._tokenizer is None:
            return ()
        held = (self._tokenizer.token_bytes(token_id) for token_id in range(self._vocab_size))
        return tuple(
            token_id for token_id, text in enumerate(held) if any(part in text for part in wanted)
        )
