"""The sequences of a request and how their tokens are generated.

`SequenceState` counts the tokens of one sequence. A `ResultConsumer` gets the results of a
request's rows and decides when the request ends: `PlainGeneration` here, `BeamSearch` in
`beam_search.py`, and `Pooling` in `request.py`. The frontend checks stop strings, except those of
beam searches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import msgspec

from octavo.api.outputs import FinishReason
from octavo.api.pooling_params import RequestParams
from octavo.api.repetition_detection import REPETITION_FOUND, RepetitionDetection
from octavo.api.sampling_params import SamplingParams
from octavo.engine.protocol.outputs import BeamOutput
from octavo.engine.protocol.step import ResultKind, RowResult, TokenLogprobs

GRAMMAR = "a grammar: what may come next depends on the tokens before"


class Finish(NamedTuple):
    """Why a request or a beam finished."""

    reason: FinishReason
    stop_reason: int | str | None = None
    """Stop token that ended the request or, for a beam, the stop string."""
    error: str | None = None


class SequenceState:
    """Tokens of a sequence, and how many of them are computed.

    `num_computed_tokens` catches up with `num_tokens`. It counts tokens whose results have arrived;
    `num_planned_tokens` also counts tokens in flight.
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
        """Number of tokens in plans whose results are outstanding."""
        self.mirostat_mu: float | None = None
        """Mirostat's mu after the last token; None before the first token, or without mirostat."""
        self.is_on_worker = False
        """Whether the worker has a row for this sequence; otherwise the next step that computes it
        adds a row.
        """

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_planned_tokens(self) -> int:
        """Number of tokens that are computed after all in-flight steps."""
        return self.num_computed_tokens + self.num_tokens_in_flight


class Branch(NamedTuple):
    """A row that continues another row's tokens and shares its blocks (or is that row itself)."""

    row: SequenceState
    parent_id: str


class RequestProgress(msgspec.Struct):
    """Progress of a request after all of its rows have results: new tokens, branches or the end."""

    num_tokens: int
    """Number of new tokens for the counters and the fair policy."""
    token_ids: list[int] = []
    """New output tokens."""
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each of `token_ids` if logprobs are requested; otherwise None."""
    is_first: bool = False
    """Whether it is the request's first output."""
    replaced_rows: Sequence[SequenceState] = ()
    """Rows that `branches` replace; empty if they remain."""
    branches: Sequence[Branch] = ()
    """Rows that branch off from the replaced ones."""
    finish: Finish | None = None
    """Why the request finished; None if it continues."""
    beams: list[BeamOutput] | None = None
    """Sequences of a finished beam search."""
    pooled: bytes | None = None
    """Pooled row of a finished pooling request, in fp32."""


class ResultConsumer(Protocol):
    """Processes the results of one request's rows."""

    @property
    def result_kind(self) -> ResultKind:
        """Kind of result that a row returns with the last of its known tokens."""
        ...

    @property
    def beams(self) -> Sequence[SequenceState]:
        """Rows that are computed instead of the request's main row; empty if there are none."""
        ...

    @property
    def num_seqs(self) -> int:
        """Maximum number of rows that the request may have."""
        ...

    @property
    def row_params(self) -> RequestParams:
        """Parameters of each row on the worker."""
        ...

    @property
    def reads_logprobs(self) -> bool:
        """Whether the scheduler needs the rows' logprobs to decide what to compute next; recordings
        then include them.
        """
        ...

    @property
    def needs_last_token(self) -> str:
        """Reason why a row's next token cannot be sampled before the scheduler knows the last one;
        "" if the number of tokens is enough.
        """
        ...

    @property
    def may_draft(self) -> bool:
        """Whether draft tokens may be proposed, so that several tokens are sampled in a step."""
        ...

    @property
    def may_branch(self) -> bool:
        """Whether drafts may be trees. Requires that sampling depends on the logits only, not on
        the row's tokens.
        """
        ...

    @property
    def samples_sequentially(self) -> bool:
        """Whether sampling depends on more than the row's tokens, so that with draft tokens the
        backend must resample one token after the other.
        """
        ...

    def set_max_num_tokens(self, max_num_tokens: int) -> None:
        """Changes the maximum number of tokens of a row, prompt included."""
        ...

    def num_multi_step_tokens(self, num_tokens: int) -> int:
        """Returns how many tokens a row of `num_tokens` may sample before the scheduler or the
        worker must do something for it.
        """
        ...

    def process_result(
        self, request: SequenceState, row: SequenceState, result: RowResult
    ) -> RequestProgress | None:
        """Processes the result of one row. Returns None until all rows have results."""
        ...

    def restart(self, token_ids: list[int]) -> list[int]:
        """Prepares to recompute a request with the tokens `token_ids`; returns the tokens to
        compute first.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndRules:
    """Rules for which token ends a request. Numbers of tokens include the prompt."""

    eos_token_ids: frozenset[int]
    end_token_ids: frozenset[int]
    """End-of-sequence and stop tokens."""
    num_prompt_tokens: int
    min_num_tokens: int
    """Minimum number of tokens before one of `end_token_ids` can end the request."""
    max_num_tokens: int
    one_token: bool = False
    """Whether the request ends with "abort" after one more token."""
    repetition: RepetitionDetection | None = None

    def get_finish(self, token_ids: Sequence[int]) -> Finish | None:
        """Returns why a request finishes with the last of its tokens. Returns None if it
        continues.
        """
        last = token_ids[-1]
        if last in self.end_token_ids and len(token_ids) >= self.min_num_tokens:
            return Finish("stop", None if last in self.eos_token_ids else last)
        if len(token_ids) >= self.max_num_tokens:
            return Finish("length")
        if self.repeats(token_ids):
            return Finish("repetition", REPETITION_FOUND)
        return Finish("abort") if self.one_token else None

    def repeats(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the output repeats itself as `repetition_detection` defines."""
        if self.repetition is None or len(token_ids) < self.min_num_tokens:
            return False
        return self.repetition.matches(token_ids, self.num_prompt_tokens)


class PlainGeneration:
    """Consumer for one sampled sequence, whose tokens are in its row."""

    result_kind: ResultKind = ResultKind.SAMPLE
    reads_logprobs = False
    num_seqs = 1
    beams: tuple[SequenceState, ...] = ()

    def __init__(
        self, params: SamplingParams, rules: EndRules, *, has_grammar: bool = False
    ) -> None:
        self.row_params = params
        self.needs_last_token = GRAMMAR if has_grammar else _needs_last_token(params)
        self.may_branch = not (self.needs_last_token or _follows_tokens(params))
        self._rules = rules
        # Logits processors are user code: they must not be called for draft tokens.
        self.may_draft = not (rules.one_token or params.logits_processors)
        self.samples_sequentially = params.mirostat_mode > 0
        self._may_end_anywhere = rules.one_token or rules.repetition is not None
        """Whether any token may end the request, not only end tokens."""
        self._watched = rules.one_token or (has_grammar and params.min_tokens > 0)
        """Whether each token needs a separate step."""

    def set_max_num_tokens(self, max_num_tokens: int) -> None:
        self._rules = replace(self._rules, max_num_tokens=max_num_tokens)

    def num_multi_step_tokens(self, num_tokens: int) -> int:
        """Returns the number of tokens up to the maximum length. Before min_tokens, the number up
        to min_tokens, where the worker must learn that end tokens are allowed.
        """
        if self._watched:
            return 1
        num_banned = self._rules.min_num_tokens - num_tokens
        num_left = self._rules.max_num_tokens - num_tokens
        return min(num_left, num_banned) if num_banned > 0 else num_left

    def process_result(
        self, request: SequenceState, row: SequenceState, result: RowResult
    ) -> RequestProgress:
        """Adds the sampled tokens to the row, up to the one that ends the request."""
        token_ids, sampled_ids, rules = row.token_ids, result.token_ids, self._rules
        num_before = len(token_ids)
        finish = None
        for token_id in sampled_ids:
            token_ids.append(token_id)
            may_end = token_id in rules.end_token_ids or len(token_ids) >= rules.max_num_tokens
            if may_end or self._may_end_anywhere:
                finish = rules.get_finish(token_ids)
                if finish is not None:
                    break
        if result.mirostat_mu is not None:
            row.mirostat_mu = result.mirostat_mu
        num_taken = len(token_ids) - num_before
        return RequestProgress(
            num_taken,
            sampled_ids[:num_taken],
            result.logprobs and result.logprobs[:num_taken],
            is_first=num_before == rules.num_prompt_tokens,
            finish=finish,
        )

    def restart(self, token_ids: list[int]) -> list[int]:
        return token_ids


def _follows_tokens(params: SamplingParams) -> bool:
    """Returns whether logits processing depends on the row's tokens. For the last token, the device
    updates its state itself.
    """
    is_penalised = (
        params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    )
    words = params.bad_words_token_ids
    bans_words = words is not None and any(len(word) > 1 for word in words)
    return bool(is_penalised or params.dry_multiplier or bans_words)


def _needs_last_token(params: SamplingParams) -> str:
    if params.dry_multiplier and params.dry_allowed_length == 1:
        return "DRY from the first token on: any token may be a repetition"
    if params.dry_multiplier and params.logit_bias:
        return "DRY and logit_bias: a penalty and a bias are added up before they are rounded"
    if params.mirostat_mode:
        return "mirostat: its bound depends on the token before"
    return ""
