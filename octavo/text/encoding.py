"""Encoding with the `tokenizers` package so that no caller holds up the others: threads may encode
at the same time, and a long text is encoded without holding Python's interpreter lock.

Knows ids and offsets; what a special token means is `octavo/text/special_text.py`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import attrgetter

from tokenizers import AddedToken, Encoding, Tokenizer

from octavo.text.unicode import is_long


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Encodes one text, with offsets in characters where it is short."""
    if not is_long(text):
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    # Only the package's batch calls give up the interpreter lock while they work.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def encode_with_offsets(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encodes one text without special tokens of its own, with offsets in characters."""
    if not is_long(text):
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_batch([text], add_special_tokens=False)[0]


def make_special(tokenizer: Tokenizer, token_ids: Iterable[int]) -> None:
    """Marks those of the added tokens as special that a tokenizer.json has as plain ones."""
    added = tokenizer.get_added_tokens_decoder()
    plain = [added[i] for i in token_ids if i in added and not added[i].special]
    for token in plain:
        token.special = True
    tokenizer.add_special_tokens(plain)


def added_runs(added: Mapping[int, AddedToken]) -> list[tuple[bool, list[AddedToken]]]:
    """Groups added tokens into runs of special and of plain ones, in the order of their ids, which
    is the order in which `tokenizers` numbers them.

    `tokenizers` rebuilds its search for all added tokens in every call that adds some, and Gemma
    has 6,400 of them.
    """
    in_order = [added[token_id] for token_id in sorted(added)]
    return [(special, list(run)) for special, run in groupby(in_order, attrgetter("special"))]


def without_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer of the same ids to which text that spells a special token is text.

    It shares the vocabulary. The package has this as a state of its objects, which no thread may
    change while another encodes.
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
