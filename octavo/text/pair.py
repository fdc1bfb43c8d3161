"""Two texts as one row of tokens: arranged by the tokenizer's special tokens and cut as
transformers' `longest_first` cuts, or written by a chat template as a query and a document.

Knows the `tokenizers` package's encodings; what reads the pair is not its business.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenizers import Encoding, Tokenizer

from octavo.api.pooling_params import PairIds, TextPair
from octavo.text.encoding import encode_with_offsets
from octavo.text.unicode import is_long

ROLES = [re.compile(f"""["']{role}["']""") for role in ("query", "document")]
"""Patterns of the roles in a template that reads pairs."""


def reads_pairs(template: str | None) -> bool:
    """Tells whether a chat template reads messages of a query and a document."""
    return template is not None and all(role.search(template) for role in ROLES)


def pair_messages(pair: TextPair) -> list[dict[str, Any]]:
    """Returns a pair as the messages of a template that reads pairs."""
    return [
        {"role": "query", "content": pair.first},
        {"role": "document", "content": pair.second},
    ]


def cut_second(tokenizer: Tokenizer, pair: TextPair) -> TextPair:
    """Returns a pair whose second text ends behind its `max_second_tokens`."""
    most = pair.max_second_tokens
    if most is None:
        return pair
    offsets = encode_with_offsets(tokenizer, pair.second).offsets
    if len(offsets) <= most:
        return pair
    return replace(pair, second=pair.second[: offsets[most - 1][1]])


def encode_texts(tokenizer: Tokenizer, first: str, second: str) -> Encoding:
    """Encodes two texts with the special tokens around them; long ones do not hold the interpreter
    lock.
    """
    if not is_long(first) and not is_long(second):
        return tokenizer.encode(first, second)
    return tokenizer.encode_batch_fast([(first, second)])[0]


def cut_pair(encoding: Encoding, max_tokens: int | None, max_second_tokens: int | None) -> PairIds:
    """Returns an encoded pair without the ends that are too long; special tokens all stay."""
    texts: list[int | None] = encoding.sequence_ids
    counts = Counter(texts)
    kept = (counts[0], counts[1])
    if max_second_tokens is not None:
        kept = (kept[0], min(kept[1], max_second_tokens))
    if max_tokens is not None:
        kept = longest_first(*kept, room=max(0, max_tokens - counts[None]))
    places = _kept(texts, lambda text, number: text is None or number < kept[text])
    ids, type_ids = encoding.ids, encoding.type_ids  # each access makes a list
    return PairIds(
        [ids[place] for place in places], [type_ids[place] for place in places], counts[None]
    )


def longest_first(num_first: int, num_second: int, *, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts are kept where `room` is for both: the shorter text
    stays whole as long as half of the room is enough for it.
    """
    if num_first + num_second <= room:
        return num_first, num_second
    shorter = min(num_first, num_second, room // 2)
    return (shorter, room - shorter) if num_first <= num_second else (room - shorter, shorter)


def _kept(texts: list[int | None], keeps: Callable[[int | None, int], bool]) -> list[int]:
    """Returns the places of the tokens that `keeps` says; it is told a token's text and its number
    in that text.
    """
    seen: Counter[int | None] = Counter()
    places = []
    for place, text in enumerate(texts):
        if keeps(text, seen[text]):
            places.append(place)
        seen[text] += 1
    return places
