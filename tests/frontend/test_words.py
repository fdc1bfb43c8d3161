"""Tokens are split into words as transformers splits them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from octavo.frontend.words import split_words

PIECES = [b" He", b"llo", b",", b" wor", b"ld", b"!", b' "', b" Yes", b'"', b" (", b"caf", b"\xc3"]
PIECES += [
    b"\xa9",
    b")",
    b" \xe4\xbd",
    b"\xa0",
    b"\xe5\xa5\xbd",
    b"\xe3\x80\x82",
    b" a",
    b"-",
    b"b",
    b" '",
]


class Spelled:
    """A tokenizer whose tokens are byte strings."""

    language = "english"
    eos_token_id = 10_000

    def decode(self, ids: Sequence[int], decode_with_timestamps: bool = False) -> str:
        return b"".join(PIECES[token] for token in ids).decode(errors="replace")


@pytest.mark.parametrize(("code", "language"), [("en", "english"), ("zh", "chinese")])
@pytest.mark.parametrize(
    "ids",
    [
        list(range(len(PIECES))),
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8],
        [9, 10, 11, 12, 13],
        [14],
        [18, 19, 20],
    ],
)
def test_words_are_those_of_transformers(ids: list[int], code: str, language: str) -> None:
    tokenizer = Spelled()
    texts, _, indices = _combine_tokens_into_words(tokenizer, ids, language)
    wanted = [(text, at[0], at[-1] + 1) for text, at in zip(texts, indices, strict=True)]
    assert split_words(ids, tokenizer.decode, code) == wanted
