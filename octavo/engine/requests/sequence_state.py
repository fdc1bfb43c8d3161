"""State of one sequence: its tokens and how many of them are computed. A request has one, a beam
search one for each beam.

The BlockManager and the worker identify a sequence by its `request_id`.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.api.outputs import FinishReason


class Finish(NamedTuple):
    """Why a request or a beam finished."""

    reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or, for a beam, the stop string."""
    error: str | None = None


class SequenceState:
    """Tokens of a sequence and how many of them are computed.

    `num_computed_tokens` catches up with `num_tokens`; it counts tokens whose results have arrived,
    and `num_planned_tokens` also those in flight.
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
        """Tokens in plans whose results are outstanding."""
        self.mirostat_mu: float | None = None
        """Bound of mirostat after the last token; None before the first one, or without it."""
        self.is_on_worker = False
        """Whether the worker has a row for this sequence; otherwise the next step that computes it
        adds one.
        """

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self.token_ids)

    @property
    def num_planned_tokens(self) -> int:
        """Number of computed tokens after all in-flight steps."""
        return self.num_computed_tokens + self.num_tokens_in_flight
