"""Tokens, and how many of them have their KV: what one row of the worker computes. A request is
one; a beam search has one for each beam.

Knows neither what the tokens are for nor which blocks hold them; the BlockManager and the worker
know it by its `request_id`.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.outputs import FinishReason


class Finish(NamedTuple):
    reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or, of a beam, the stop string."""
    error: str | None = None


class TokenRow:
    """`num_computed_tokens` catches up with `num_tokens`; it counts what has come back,
    `num_planned_tokens` what is in flight too.
    """

    __slots__ = (
        "is_on_worker",
        "num_computed_tokens",
        "num_tokens_in_flight",
        "request_id",
        "token_ids",
    )

    def __init__(self, request_id: str, token_ids: list[int], num_computed_tokens: int = 0) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self.num_computed_tokens = num_computed_tokens
        self.num_tokens_in_flight = 0
        """Of plans whose results have not been taken in."""
        self.is_on_worker = False
        """The worker has a row with these tokens; otherwise it gets one with the next step that
        computes some.
        """

    @property
    def num_tokens(self) -> int:
        """Those that are known."""
        return len(self.token_ids)

    @property
    def num_planned_tokens(self) -> int:
        return self.num_computed_tokens + self.num_tokens_in_flight
