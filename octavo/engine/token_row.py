"""Tokens, and how many of them have their KV: what one row of the worker computes. A request is one; a beam search has one for each beam.

Knows neither what the tokens are for nor which blocks hold them; the BlockManager and the worker know it by its `request_id`.
"""

from __future__ import annotations


class TokenRow:
    """`num_computed_tokens` catches up with `num_tokens`."""

    __slots__ = ("is_on_worker", "num_computed_tokens", "request_id", "token_ids")

    def __init__(self, request_id: str, token_ids: list[int], num_computed_tokens: int = 0) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self.num_computed_tokens = num_computed_tokens
        self.is_on_worker = False
        """The worker has a row with these tokens; otherwise it gets one with the next step that computes some."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
