"""The protocol behind which a plain request, a beam search and a pooling request take what their
rows yield.

The scheduler gives each row's result to the request's consumer and carries out what comes of it: it
counts tokens, branches rows, ends the request. A consumer owns the rules by which tokens end a
request; it knows neither blocks nor steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from octavo.api.pooling_params import RequestParams
from octavo.engine.protocol.outputs import BeamOutput
from octavo.engine.protocol.step import RowResult, TokenLogprobs, Wants
from octavo.engine.requests.sequence_state import Finish, SequenceState


class Branch(NamedTuple):
    """A row that continues another one's tokens, and shares its blocks where it is not that row."""

    row: SequenceState
    parent_id: str


class RequestProgress(msgspec.Struct):
    """New tokens, branches or the end of a request, once all of its rows have yielded."""

    num_tokens: int
    """Number of new tokens, as the counters and a fair policy count them."""
    token_ids: list[int] = []
    """New tokens to hand out."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each of `token_ids` where logprobs are wanted."""
    is_first: bool = False
    """Whether the request hands out something for the first time."""
    replaced_rows: Sequence[SequenceState] = ()
    """The request's rows where others branch off them and take their place; empty where they
    stay.
    """
    branches: Sequence[Branch] = ()
    """The rows that take their place."""
    finish: Finish | None = None
    """How the request ends; None where it goes on."""
    beams: list[BeamOutput] | None = None
    """Sequences that a beam search has found, with its end."""
    pooled: bytes | None = None
    """The row that a pooling request wanted, in fp32, with its end."""


class ResultConsumer(Protocol):
    """Takes the results of one request's rows. `PlainGeneration`, `BeamSearch` and
    `Pooling` are three.
    """

    @property
    def wants(self) -> Wants:
        """Kind of result that a row yields with the last of its known tokens."""
        ...

    @property
    def beams(self) -> Sequence[SequenceState]:
        """Rows that are computed instead of the request's own; empty if there are none."""
        ...

    @property
    def num_seqs(self) -> int:
        """Maximum number of rows that the request may have."""
        ...

    @property
    def row_params(self) -> RequestParams:
        """How the worker draws or pools each row."""
        ...

    @property
    def reads_logprobs(self) -> bool:
        """Whether the rows' logprobs decide what is computed next; a recording then holds them."""
        ...

    @property
    def needs_last_token(self) -> str:
        """Reason why a row's next token cannot be drawn before its last one is known here; "" where
        the number of its tokens is enough.
        """
        ...

    @property
    def may_draft(self) -> bool:
        """Whether tokens may be guessed, and several be drawn at once."""
        ...

    @property
    def may_branch(self) -> bool:
        """Whether guesses may branch: nothing but the model depends on which tokens a row has."""
        ...

    @property
    def samples_sequentially(self) -> bool:
        """Whether how a token is drawn changes with what was drawn before, beyond its tokens: with
        guesses, the backend then has to draw again.
        """
        ...

    def set_max_num_tokens(self, max_num_tokens: int) -> None:
        """Changes the most tokens that a row may come to hold, prompt included."""
        ...

    def num_plain_draws(self, num_tokens: int) -> int:
        """Returns how many tokens a row of `num_tokens` may draw one after another before the
        scheduler or the worker has something to do for it.
        """
        ...

    def take(
        self, request: SequenceState, row: SequenceState, result: RowResult
    ) -> RequestProgress | None:
        """Takes in what one row of the request drew; returns None until all rows have yielded."""
        ...

    def start_over(self, token_ids: list[int]) -> list[int]:
        """Prepares for a request that has lost its blocks; returns the tokens to compute first,
        where `token_ids` are the request's own.
        """
        ...
