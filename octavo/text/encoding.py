"""Encodes with the `tokenizers` package without blocking other threads: long texts are encoded
without the GIL.

`special_text.py` handles special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import attrgetter

from tokenizers import AddedToken, Encoding, Tokenizer

from octavo.text.unicode import is_long


def encode_with_offsets(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encodes a text without special tokens, with character offsets."""
    if not is_long(text):
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def make_special(tokenizer: Tokenizer, token_ids: Iterable[int]) -> None:
    """Marks added tokens as special if tokenizer.json has them as normal ones."""
    added = tokenizer.get_added_tokens_decoder()
    plain = [added[i] for i in token_ids if i in added and not added[i].special]
    for token in plain:
        token.special = True
    tokenizer.add_special_tokens(plain)


def added_runs(added: Mapping[int, AddedToken]) -> list[tuple[bool, list[AddedToken]]]:
    """Groups added tokens into runs of special and normal ones, by id, which is how `tokenizers`
    numbers them.

    `tokenizers` rebuilds its search structure for all added tokens on every call that adds tokens;
    Gemma has 6,400.
    """
    in_order = [added[token_id] for token_id in sorted(added)]
    return [(special, list(run)) for special, run in groupby(in_order, attrgetter("special"))]


def without_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer with the same ids that treats special token text as plain text.

    Shares the vocabulary. The package only offers this as a mutable setting, which must not change
    while other threads encode.
    """
    plain = Tokenizer(tokenizer.model)
    plain.normalizer = tokenizer.normalizer
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.post_processor = tokenizer.post_processor
    added = tokenizer.get_added_tokens_decoder()
    for is_special, tokens in added_runs(added):
        (plain.add_special_tokens if is_special else plain.add_tokens)(tokens)
    if plain.get_added_tokens_decoder().keys() != added.keys():
        plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    return plain
