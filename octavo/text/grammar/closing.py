"""Finds a short completion of a grammar, for output that reaches its length limit.

A fixed rule picks each next byte from the matcher's state, then the bytes are split into the fewest
tokens. The rule handles JSON brackets; for other grammars, it succeeds if its byte orders lead to
an end. Source: greedy completion of partial JSON, and Viterbi segmentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llguidance import LLMatcher

from octavo.text.grammar.vocabulary import SPECIAL, VocabularyTexts

MAX_BYTES = 256
"""Maximum length of a completion in bytes."""
MAX_TRIED = 32
"""Maximum number of legal bytes that are tried to find one that completes the text."""
QUOTE = b'"'
INSIDE_A_STRING = 64
"""If more bytes than this are legal, the text is inside a string, where brackets close nothing."""
CLOSERS = b'}])",:0123456789ntf-[{'
"""Byte order that closes JSON: terminators first, then the shortest values."""

JSON_ORDER = bytes([*CLOSERS, *(byte for byte in range(256) if byte not in CLOSERS)])
LAST_ORDER = bytes(reversed(range(256)))
"""Byte order that ends repetitions whose first legal bytes would continue forever."""


def closing(
    matcher: LLMatcher, texts: VocabularyTexts, orders: Sequence[bytes], max_tokens: int
) -> list[int] | None:
    """Returns the shortest completion found, of at most `max_tokens` tokens, or None."""
    ways = [_way(matcher.deep_copy(), texts, order) for order in orders]
    candidates = [_cut(way, texts) for way in ways if way is not None]
    return min(
        (tokens for tokens in candidates if len(tokens) <= max_tokens), key=len, default=None
    )


def _way(matcher: LLMatcher, texts: VocabularyTexts, order: bytes) -> bytes | None:
    """Returns the bytes that complete a text (special tokens in llguidance's notation), None if the
    byte order does not lead to an end.
    """
    way = bytearray()
    while len(way) <= MAX_BYTES:
        if matcher.is_accepting():
            return bytes(way)
        forced = matcher.compute_ff_bytes()
        step = forced or _next_byte(matcher, texts, order)
        if not step or matcher.is_error():
            return None
        num_taken = matcher.try_consume_tokens(_cut(step, texts))
        if matcher.is_error() or not num_taken:
            return None
        way += step
    return None


def _next_byte(matcher: LLMatcher, texts: VocabularyTexts, order: bytes) -> bytes:
    """Returns the next byte: one that completes the text if possible, otherwise the first legal
    one.
    """
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
    """Splits completion bytes into the fewest tokens."""
    return [token_id for part in _parts(way) for token_id in texts.fewest_tokens(part)]


def _parts(way: bytes) -> Iterator[bytes]:
    """Yields the text segments and special tokens of a completion."""
    text, *others = way.split(SPECIAL)
    yield text
    for other in others:
        number, _, text = other.partition(b"]")
        yield SPECIAL + number + b"]"
        yield text
