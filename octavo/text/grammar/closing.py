"""The short way to the end of a grammar's text, for an answer whose length runs out.

A fixed rule chooses each next byte by where the matcher is, so that a way's rest is the way from
any place on it; then the bytes are cut into the fewest tokens. The rule knows JSON's brackets; of
other grammars it finds the end where its orders of bytes lead there. Source: the greedy completion
of partial JSON, and Viterbi's segmentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llguidance import LLMatcher

from octavo.text.grammar.vocabulary import SPECIAL, VocabularyTexts

MAX_BYTES = 256
"""Longest way that is followed, in bytes."""
MAX_TRIED = 32
"""Bytes that are tried for one that completes the text, where no more are legal."""
QUOTE = b'"'
INSIDE_A_STRING = 64
"""Number of legal bytes above which a text is inside a string, where brackets close nothing."""
CLOSERS = b'}])",:0123456789ntf-[{'
"""Bytes in the order in which JSON is closed: what ends a part, then the shortest values."""

JSON_ORDER = bytes([*CLOSERS, *(byte for byte in range(256) if byte not in CLOSERS)])
LAST_ORDER = bytes(reversed(range(256)))
"""Order that leads out of repetitions whose first bytes go on for ever."""


def closing(
    matcher: LLMatcher, texts: VocabularyTexts, orders: Sequence[bytes], most: int
) -> list[int] | None:
    """Returns the fewest tokens found, at most `most`, after which a text may end; None where there
    are none.
    """
    ways = [_way(matcher.deep_copy(), texts, order) for order in orders]
    found = [_cut(way, texts) for way in ways if way is not None]
    return min((tokens for tokens in found if len(tokens) <= most), key=len, default=None)


def _way(matcher: LLMatcher, texts: VocabularyTexts, order: bytes) -> bytes | None:
    """Returns the bytes that end a text, special tokens as llguidance writes them; None where the
    order of bytes leads nowhere.
    """
    way = bytearray()
    while len(way) <= MAX_BYTES:
        if matcher.is_accepting():
            return bytes(way)
        forced = matcher.compute_ff_bytes()
        step = forced or _next_byte(matcher, texts, order)
        if not step or matcher.is_error():
            return None
        taken = matcher.try_consume_tokens(_cut(step, texts))
        if matcher.is_error() or not taken:
            return None
        way += step
    return None


def _next_byte(matcher: LLMatcher, texts: VocabularyTexts, order: bytes) -> bytes:
    """Returns the byte that the text goes on with: one that completes it, else the first."""
    mask = matcher.compute_bitmask()
    legal = [
        (bytes([byte]), token_id)
        for byte in order
        if (token_id := texts.byte_token(byte)) is not None
        and mask[token_id // 8] >> token_id % 8 & 1
    ]
    if len(legal) > INSIDE_A_STRING and QUOTE in (byte for byte, _ in legal):
        return QUOTE
    if len(legal) <= MAX_TRIED:
        for byte, token_id in legal:
            tried = matcher.deep_copy()
            if tried.try_consume_tokens([token_id]) and tried.is_accepting():
                return byte
    return legal[0][0] if legal else b""


def _cut(way: bytes, texts: VocabularyTexts) -> list[int]:
    """Returns the fewest tokens whose texts are a way."""
    return [token_id for part in _parts(way) for token_id in texts.fewest_tokens(part)]


def _parts(way: bytes) -> Iterator[bytes]:
    """Yields the texts of a way, and the special tokens between them."""
    text, *others = way.split(SPECIAL)
    yield text
    for other in others:
        number, _, text = other.partition(b"]")
        yield SPECIAL + number + b"]"
        yield text
