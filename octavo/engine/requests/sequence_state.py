"""Tokens, and how many of them have their KV: the state of one row of the worker. A request is a
row; a beam search has one for each beam.

Knows neither what the tokens are for nor which blocks hold them; the BlockManager and the worker
know a row by its `request_id`.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.api.outputs import FinishReason


class Finish(NamedTuple):
    """How a request or a beam ends."""

    reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or, for a beam, the stop string."""
    error: str | None = None


class SequenceState:
    """A sequence of tokens that is computed step by step.

    `num_computed_tokens` catches up with `num_tokens`. It counts tokens whose result has come back,
    `num_planned_tokens` those in flight too.
    """

    __slots__ = (
        "is_on_worker",
        "mirostat_mu",
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
        """Tokens in plans whose results have not been taken in."""
        self.mirostat_mu: float | None = None
        """Bound of mirostat after the last token; None before the first one, or without it."""
        self.is_on_worker = False
        """Whether the worker has a row with these tokens; if not, it gets one with the next step
        that computes some.
        """

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self.token_ids)

    @property
    def num_planned_tokens(self) -> int:
        """Number of tokens that are computed once all steps in flight are back."""
        return self.num_computed_tokens + self.num_tokens_in_flight
