"""Splits a transcript's tokens into words. Source: `_combine_tokens_into_words` of transformers."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that do not separate words by spaces; each character is a word."""
BEFORE, AFTER = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the next word, and to the previous one."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class WordTokens(NamedTuple):
    """A word, with the index of its first token and the index after its last one."""

    text: str
    start: int
    end: int


def split_words(token_ids: Sequence[int], decode: Decode, language: str) -> list[WordTokens]:
    """Returns the words of a text's tokens, with the spaces before them."""
    characters = _split_characters(token_ids, decode)
    if language in WITHOUT_SPACES:
        return _with_punctuation(characters)
    words: list[WordTokens] = []
    for part in characters:
        begins = part.text.startswith(" ") or part.text.strip() in string.punctuation
        if begins or not words:
            words.append(part)
        else:
            words[-1] = WordTokens(words[-1].text + part.text, words[-1].start, part.end)
    return _with_punctuation(words)


def _split_characters(token_ids: Sequence[int], decode: Decode) -> list[WordTokens]:
    """Returns the shortest runs of tokens that are complete characters."""
    whole = decode(token_ids)
    offset, start = 0, 0
    found: list[WordTokens] = []
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[start:end])
        index = offset + text.find(INCOMPLETE)
        if INCOMPLETE not in text or index >= len(whole) or whole[index] == INCOMPLETE:
            found.append(WordTokens(text, start, end))
            offset, start = offset + len(text), end
    return found


def _with_punctuation(words: list[WordTokens]) -> list[WordTokens]:
    """Joins punctuation with the words that it belongs to."""
    joined: list[WordTokens] = []
    for word in reversed(words):
        stripped = word.text.strip()
        if joined and word.text.startswith(" ") and stripped and stripped in BEFORE:
            joined[-1] = WordTokens(word.text + joined[-1].text, word.start, joined[-1].end)
        else:
            joined.append(word)
    found: list[WordTokens] = []
    for word in reversed(joined):
        if found and not found[-1].text.endswith(" ") and word.text in AFTER:
            found[-1] = WordTokens(found[-1].text + word.text, found[-1].start, word.end)
        else:
            found.append(word)
    return found
