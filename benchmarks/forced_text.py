"""A logits processor that lets a model write a given text, so that the logprobs of generated tokens
can be compared: `logits_processors=["forced_text:follow"]`, with this folder on Python's path.

A request's text is found by its prompt, which is the text's beginning.
"""

import numpy as np

TEXTS: dict[bytes, list[int]] = {}
"""Token ids of each text, by the first of them as bytes."""

KNOWN_BY = 32
"""Tokens that tell the texts apart."""


def learn(token_ids: list[int]) -> None:
    """Adds a text."""
    TEXTS[_name(np.array(token_ids))] = token_ids


def follow(token_ids, logits):
    """Leaves the text's next token alone to be drawn."""
    following = TEXTS[_name(token_ids)][len(token_ids)]
    forced = np.full_like(logits, -np.inf)
    forced[following] = 0
    return forced


def _name(token_ids) -> bytes:
    return token_ids[:KNOWN_BY].astype(np.int64).tobytes()
