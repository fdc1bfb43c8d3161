"""A request in the scheduler.

For a user's request with n samples, the frontend creates n of these. Independent of text, blocks
and arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from octavo.api.outputs import Timings
from octavo.api.pooling_params import PoolingParams, RequestParams
from octavo.engine.protocol.kv_cache_spec import UNBOUNDED
from octavo.engine.protocol.original_context import ONE_CONTEXT, OriginalContext
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.protocol.step import ResultKind, RowResult, TokenLogprobs, WeightArrivals
from octavo.engine.requests.beam_search import BeamSearch
from octavo.engine.requests.sequence_state import (
    EndRules,
    Finish,
    PlainGeneration,
    RequestProgress,
    ResultConsumer,
    SequenceState,
)
from octavo.engine.requests.stop_strings import MakeStopTexts
from octavo.engine.requests.timings import Stopwatch


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Request(SequenceState):
    """Tokens, counts and state of one request; only the scheduler changes it.

    `num_computed_tokens` catches up with `num_tokens`: first the prompt, then each sampled token.
    `max_num_tokens` is the lowest of the limits from max_tokens, context and KV cache. The
    `consumer` processes the results of its rows: a beam search computes the prompt in the request's
    main row and then has one row for each beam. All rows of a request are preempted, resumed and
    ended together.
    """

    __slots__ = (
        "consumer",
        "end_token_ids",
        "ends_by_text",
        "first_position",
        "fork_of",
        "is_encoded",
        "max_num_tokens",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_exact_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_swaps",
        "original",
        "params",
        "prompt_logprobs",
        "scheduled_ts",
        "source",
        "status",
        "watch",
        "weights",
    )

    def __init__(
        self,
        source: EngineRequest,
        *,
        max_num_tokens: int,
        make_stop_texts: MakeStopTexts | None = None,
        original: OriginalContext = ONE_CONTEXT,
    ) -> None:
        """`make_stop_texts`: required for beam searches with stop strings."""
        super().__init__(source.request_id, [*source.prompt_token_ids, *source.output_token_ids])
        self.mirostat_mu = source.mirostat_mu
        params = source.params
        self.source = source
        self.params = params
        self.ends_by_text = params.ends_by_text
        """Whether the frontend may end the request at a stop string."""
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.max_num_tokens = max_num_tokens
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_num_tokens, self.num_prompt_tokens + params.max_tokens)
        self.end_token_ids = frozenset(source.eos_token_ids) | frozenset(
            params.stop_token_ids or ()
        )
        self.fork_of = source.fork_of
        self.is_encoded = source.encoder_input is None
        self.status = RequestStatus.WAITING
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_draft_tokens = 0
        """Number of draft tokens that were verified."""
        self.num_accepted_tokens = 0
        self.weights = WeightArrivals()
        """Weights read from files for its steps, divided by the number of requests in each step."""
        self.watch = Stopwatch(source.arrival_time, resumed=source.resumed)
        self.scheduled_ts: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.consumer = self._make_consumer(make_stop_texts)
        self.original = original
        self.first_position = 0
        """Position of its first token."""
        self.num_exact_tokens = original.num_tokens
        """Maximum number of tokens for which its positions are valid; if it has more, all tokens
        are recomputed with new positions.
        """
        if len(self.token_ids) > original.num_tokens:
            self._place(len(self.token_ids))

    def _make_consumer(self, make_stop_texts: MakeStopTexts | None) -> ResultConsumer:
        source, params = self.source, self.params
        if isinstance(params, PoolingParams):
            return Pooling(params)
        if params.beam_width is not None:
            stop_texts = None
            if make_stop_texts is not None and params.stop_strings:
                stop_texts = make_stop_texts(params)
            return BeamSearch(
                self.request_id,
                params,
                eos_token_ids=source.eos_token_ids,
                num_prompt_tokens=self.num_prompt_tokens,
                max_num_tokens=self.max_num_tokens,
                stop_texts=stop_texts,
                has_grammar=source.grammar is not None,
            )
        rules = EndRules(
            frozenset(source.eos_token_ids),
            self.end_token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            # Until then, the worker bans the grammar's end if other tokens are allowed.
            min_num_tokens=self.num_prompt_tokens + (0 if source.grammar else params.min_tokens),
            max_num_tokens=self.max_num_tokens,
            one_token=source.one_token,
            repetition=params.repetition_detection,
        )
        return PlainGeneration(params, rules, has_grammar=source.grammar is not None)

    def change(self, params: RequestParams, *, max_num_tokens: int) -> None:
        """Changes its params. `max_num_tokens` is the limit from context and KV cache."""
        if params == self.params:
            return
        self.params = params
        self.ends_by_text = params.ends_by_text
        self.max_num_tokens = max_num_tokens
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_num_tokens, self.num_prompt_tokens + params.max_tokens)
        self.consumer.set_max_num_tokens(self.max_num_tokens)

    @property
    def rows(self) -> Sequence[SequenceState]:
        """Its rows: the request itself, or the beams of a beam search."""
        return self.consumer.beams or (self,)

    @property
    def num_seqs(self) -> int:
        """Maximum number of rows that it may have."""
        return self.consumer.num_seqs

    @property
    def num_multi_step_tokens(self) -> int:
        """Number of tokens that it may sample before the scheduler must make a decision."""
        plain = self.consumer.num_multi_step_tokens(self.num_tokens)
        return min(plain, self.num_exact_tokens + 1 - self.num_tokens)

    @property
    def num_draftable_tokens(self) -> int:
        """Maximum length of a row, draft tokens included."""
        return min(self.max_num_tokens - 1, self.num_exact_tokens)

    @property
    def has_outgrown(self) -> bool:
        """Whether it has more tokens than its positions are valid for."""
        num_exact_tokens = self.num_exact_tokens
        return num_exact_tokens < UNBOUNDED and any(
            row.num_tokens > num_exact_tokens for row in self.rows
        )

    @property
    def has_run(self) -> bool:
        """Whether it has been started; if it waits, it was preempted."""
        return self.scheduled_ts is not None

    @property
    def num_input_tokens(self) -> int:
        """Number of rows of its encoder input; 0 without one."""
        return 0 if self.source.encoder_input is None else self.source.encoder_input.num_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next token can be scheduled before the one being sampled is known: the
        request cannot end by its length first, its positions do not change, and its sampling does
        not depend on that token.
        """
        num_tokens = len(self.token_ids)
        ends = num_tokens + 1 >= self.max_num_tokens or self.source.one_token
        return not (ends or self.consumer.needs_last_token) and num_tokens < self.num_exact_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still to be computed."""
        num_wanted = self.num_prompt_tokens - self.params.first_prompt_logprob
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < num_wanted

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of tokens to take from the prefix cache: a prompt logprob needs the
        activations of the token before.
        """
        if self.params.prompt_logprobs is None or not self.wants_prompt_logprobs:
            return len(self.token_ids)
        return self.params.first_prompt_logprob - 1

    def add_prompt_logprobs(self, position: int, logprobs: list[TokenLogprobs]) -> None:
        """Adds logprobs of the prompt tokens from `position` on; skips tokens before the first
        requested one.
        """
        self.prompt_logprobs += logprobs[max(0, self.params.first_prompt_logprob - position) :]

    def describe_start(self, output: EngineOutput) -> None:
        """Adds the fields of a request's first output."""
        output.num_cached_tokens = self.num_cached_tokens
        output.scheduled_ts = self.scheduled_ts
        if self.params.prompt_logprobs is not None:
            output.prompt_logprobs = self.prompt_logprobs

    def final_output(self, finish: Finish, so_far: Timings) -> EngineOutput:
        """Returns the last output, without tokens."""
        return EngineOutput(
            self.request_id,
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            error=finish.error,
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
            timings=self.timings(so_far),
        )

    def timings(self, so_far: Timings) -> Timings:
        """Returns `so_far` with the request's own counts."""
        return replace(
            so_far,
            cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
            draft_tokens=self.num_draft_tokens,
            accepted_tokens=self.num_accepted_tokens,
            streamed_bytes=self.weights.num_bytes,
            neurons_found=self.weights.neurons_found,
            neurons_read=self.weights.neurons_read,
        )

    def swap_out(self) -> None:
        self.status = RequestStatus.SWAPPED
        self.num_swaps += 1

    def restart(self) -> None:
        """Resets the request to waiting, with nothing computed."""
        self._place(max(row.num_tokens for row in self.rows))
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.is_encoded = self.source.encoder_input is None
        self.token_ids = self.consumer.restart(self.token_ids)
        if self.wants_prompt_logprobs:
            self.prompt_logprobs.clear()

    def _place(self, num_tokens: int) -> None:
        """Sets the first position according to the length of the longest row."""
        if self.first_position == 0 and num_tokens > self.original.num_tokens:
            self.first_position = self.original.first_position(num_tokens)
            self.num_exact_tokens = UNBOUNDED


class Pooling:
    """Consumer for one pooled row.

    Implements `ResultConsumer`. The request ends with the step that computes its last token.
    """

    result_kind: ResultKind = ResultKind.POOL
    reads_logprobs = False
    num_seqs = 1
    beams: tuple[SequenceState, ...] = ()
    may_draft = False
    may_branch = False
    samples_sequentially = False
    needs_last_token = ""

    def __init__(self, params: PoolingParams) -> None:
        self.row_params = params

    def set_max_num_tokens(self, max_num_tokens: int) -> None:
        """Does nothing: no tokens follow the prompt."""

    def num_multi_step_tokens(self, num_tokens: int) -> int:
        return 1

    def process_result(
        self, request: SequenceState, row: SequenceState, result: RowResult
    ) -> RequestProgress:
        """Returns the pooled row and ends the request."""
        assert result.pooled is not None, "a row without a fault has what it wants"
        return RequestProgress(0, pooled=result.pooled, is_first=True, finish=Finish("stop"))

    def restart(self, token_ids: list[int]) -> list[int]:
        return token_ids
