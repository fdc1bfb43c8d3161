"""Encodes two texts as one sequence: with the tokenizer's special tokens, truncated like
transformers' `longest_first`, or through a chat template with query and document roles.
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
"""Patterns that match the roles in a pair template."""


def reads_pairs(template: str | None) -> bool:
    """Returns whether a chat template supports query and document messages."""
    return template is not None and all(role.search(template) for role in ROLES)


def pair_messages(pair: TextPair) -> list[dict[str, Any]]:
    """Returns a pair as messages for a pair template."""
    return [
        {"role": "query", "content": pair.first},
        {"role": "document", "content": pair.second},
    ]


def cut_second(tokenizer: Tokenizer, pair: TextPair) -> TextPair:
    """Truncates the second text to `max_second_tokens`."""
    max_tokens = pair.max_second_tokens
    if max_tokens is None:
        return pair
    offsets = encode_with_offsets(tokenizer, pair.second).offsets
    if len(offsets) <= max_tokens:
        return pair
    return replace(pair, second=pair.second[: offsets[max_tokens - 1][1]])


def encode_texts(tokenizer: Tokenizer, first: str, second: str) -> Encoding:
    """Encodes two texts with special tokens; long ones without the GIL."""
    if not is_long(first) and not is_long(second):
        return tokenizer.encode(first, second)
    return tokenizer.encode_batch_fast([(first, second)])[0]


def cut_pair(encoding: Encoding, max_tokens: int | None, max_second_tokens: int | None) -> PairIds:
    """Truncates an encoded pair; keeps all special tokens."""
    texts: list[int | None] = encoding.sequence_ids
    counts = Counter(texts)
    kept_counts = (counts[0], counts[1])
    if max_second_tokens is not None:
        kept_counts = (kept_counts[0], min(kept_counts[1], max_second_tokens))
    if max_tokens is not None:
        kept_counts = longest_first(*kept_counts, room=max(0, max_tokens - counts[None]))
    indices = _select_indices(
        texts, lambda text, number: text is None or number < kept_counts[text]
    )
    ids, type_ids = encoding.ids, encoding.type_ids  # each access creates a new list
    return PairIds(
        [ids[index] for index in indices], [type_ids[index] for index in indices], counts[None]
    )


def longest_first(num_first: int, num_second: int, *, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts to keep within `room`: the shorter text is kept
    completely up to half of the room.
    """
    if num_first + num_second <= room:
        return num_first, num_second
    shorter = min(num_first, num_second, room // 2)
    return (shorter, room - shorter) if num_first <= num_second else (room - shorter, shorter)


def _select_indices(texts: list[int | None], keeps: Callable[[int | None, int], bool]) -> list[int]:
    """Returns the indices of tokens for which `keeps(text, index in text)` is true."""
    seen: Counter[int | None] = Counter()
    indices = []
    for index, text in enumerate(texts):
        if keeps(text, seen[text]):
            indices.append(index)
        seen[text] += 1
    return indices
