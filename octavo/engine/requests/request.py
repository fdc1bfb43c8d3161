"""A request as the core knows it: what came in (EngineRequest), its state (Request), and what goes
out (EngineOutput).

One sample each: the front makes n of them where a user asks for n. Knows no text, no block and no
array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

import msgspec

from octavo.engine.requests.beam_search import BeamOutput, BeamSearch, StopTexts
from octavo.engine.requests.timings import Stopwatch
from octavo.engine.requests.token_row import Finish, TokenRow
from octavo.outputs import FinishReason, Timings
from octavo.sampling_params import SamplingParams
from octavo.step import TokenLogprobs


class EngineRequest(msgspec.Struct):
    """What the front hands to the core, validated; crosses process boundaries."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """64 bits, always set."""
    eos_token_ids: list[int] = []
    """Empty where they are to be ignored."""
    sample_index: int = 0
    fork_of: str | None = None
    """The request that computes the same prompt, whose blocks this one is to share once they hold
    it.
    """
    cache_salt: str = ""
    """Prefix hits happen among equal salts only."""
    priority: int = 0
    """Lower goes first, where the policy looks at it."""
    tenant: str = ""
    """Among whom a fair policy shares."""
    arrival_time: float = 0.0
    """On the monotonic clock of the machine."""
    output_token_ids: list[int] = []
    """What an earlier core has sampled for it already."""
    resumed: bool = False
    """An earlier core knew it."""
    one_token: bool = False
    """It ends as if aborted once it has yielded one more token, where that is not its end anyway.
    """


class EngineOutput(msgspec.Struct, omit_defaults=True):
    """What one step gave one request. The last one of a request, and only that, has a
    finish_reason.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt tokens from the second on, all at once with the first token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token, where one of `stop_token_ids` ended the request."""
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    """Of the preemptions, those to host memory."""
    scheduled_ts: float | None = None
    beams: list[BeamOutput] | None = None
    """What a beam search has found, all at once with the finish_reason; it yields no tokens before.
    """
    timings: Timings | None = None
    """With the finish_reason, and wherever the front may end the request because of a text."""


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Request(TokenRow):
    """Tokens, counts and state of one request; the scheduler is its only writer.

    `num_computed_tokens` catches up with `num_tokens`: the prompt's tokens, then each one that was
    sampled. `max_num_tokens` is the most it may ever hold, by max_tokens, the context and the KV
    cache. One with a `search` computes its prompt itself and then, in a row for each, the beams; it
    is preempted, returns and ends with all of them.
    """

    __slots__ = (
        "end_token_ids",
        "fork_of",
        "max_num_tokens",
        "min_num_tokens",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_swaps",
        "params",
        "prompt_logprobs",
        "scheduled_ts",
        "search",
        "source",
        "status",
        "waits_for_tokens",
        "watch",
    )

    def __init__(
        self, source: EngineRequest, *, max_num_tokens: int, stop_texts: StopTexts | None = None
    ) -> None:
        """`stop_texts`: of a beam search with stop strings."""
        super().__init__(source.request_id, [*source.prompt_token_ids, *source.output_token_ids])
        params = source.params
        self.source = source
        self.params = params
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.max_num_tokens = max_num_tokens
        if params.max_tokens is not None:
            self.max_num_tokens = min(max_num_tokens, self.num_prompt_tokens + params.max_tokens)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.end_token_ids = frozenset(source.eos_token_ids) | frozenset(
            params.stop_token_ids or ()
        )
        self.fork_of = source.fork_of
        self.status = RequestStatus.WAITING
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self.watch = Stopwatch(source.arrival_time, resumed=source.resumed)
        self.scheduled_ts: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.waits_for_tokens = needs_last_token(params)
        """Why none of its steps is planned before the one before is back; "" where they are."""
        self.search: BeamSearch | None = None
        if params.beam_width is not None:
            self.search = BeamSearch(
                self.request_id,
                params,
                eos_token_ids=source.eos_token_ids,
                num_prompt_tokens=self.num_prompt_tokens,
                max_num_tokens=self.max_num_tokens,
                stop_texts=stop_texts,
            )

    @property
    def rows(self) -> Sequence[TokenRow]:
        """What is computed of it."""
        return self.search.beams if self.search is not None and self.search.beams else (self,)

    @property
    def num_seqs(self) -> int:
        """Rows that it may come to have."""
        return 1 if self.search is None else self.search.width

    @property
    def row_params(self) -> SamplingParams:
        """How its rows are drawn."""
        return self.params if self.search is None else self.search.row_params

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def may_go_on(self) -> bool:
        """Whatever its next token is: only a stop token can end it with that one."""
        return len(self.token_ids) + 1 < self.max_num_tokens and not self.source.one_token

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some of them are still to come."""
        num_wanted = self.num_prompt_tokens - self.params.first_prompt_logprob
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < num_wanted

    @property
    def max_cached_tokens(self) -> int:
        """How many tokens may be found computed: a prompt logprob needs the activations of the
        token before.
        """
        return (
            self.params.first_prompt_logprob - 1 if self.wants_prompt_logprobs else self.num_tokens
        )

    def take_prompt_logprobs(self, position: int, logprobs: list[TokenLogprobs]) -> None:
        """Those of the prompt's tokens from `position` on, of which some may not be wanted."""
        self.prompt_logprobs += logprobs[max(0, self.params.first_prompt_logprob - position) :]

    @property
    def num_plain_draws(self) -> int:
        """Tokens that it may draw one after another before the scheduler or the worker has
        something to do for it.

        Its length ends it no earlier, and it is told no earlier that it may end (min_tokens).
        """
        if self.search is not None or self.source.one_token or self.params.bad_words_token_ids:
            return 1
        num_banned = self.min_num_tokens - self.num_tokens
        num_left = self.max_num_tokens - self.num_tokens
        return min(num_left, num_banned) if num_banned > 0 else num_left

    def extend(self, token_ids: Sequence[int]) -> Finish | None:
        """Sampled tokens, as far as one of them ends the request."""
        for token_id in token_ids:
            finish = self._append(token_id)
            if finish is not None:
                return finish
        return None

    def _append(self, token_id: int) -> Finish | None:
        """One more sampled token; says whether the request ends with it."""
        self.token_ids.append(token_id)
        if token_id in self.end_token_ids and len(self.token_ids) >= self.min_num_tokens:
            return Finish("stop", None if token_id in self.source.eos_token_ids else token_id)
        if len(self.token_ids) >= self.max_num_tokens:
            return Finish("length")
        return Finish("abort") if self.source.one_token else None

    def describe_start(self, output: EngineOutput) -> None:
        """What is said once, with its first tokens."""
        output.num_cached_tokens = self.num_cached_tokens
        output.scheduled_ts = self.scheduled_ts
        if self.params.prompt_logprobs is not None:
            output.prompt_logprobs = self.prompt_logprobs

    def final_output(self, finish: Finish, so_far: Timings) -> EngineOutput:
        """`so_far`: where its time went."""
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
        """With its own counts."""
        return replace(
            so_far,
            cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
        )

    def swap_out(self) -> None:
        """Off the device, with all that is computed."""
        self.status = RequestStatus.SWAPPED
        self.num_swaps += 1

    def start_over(self) -> None:
        """Back to waiting, with nothing computed."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        if self.search is not None:
            self.token_ids = self.search.fold(self.token_ids)
        if self.wants_prompt_logprobs:
            self.prompt_logprobs.clear()


def needs_last_token(params: SamplingParams) -> str:
    """Why a request's next token cannot be drawn by who does not know its last one; "" where its
    number is enough.
    """
    if params.beam_width is not None:
        return "a beam search: which beams go on is decided by what they yield"
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        return "a penalty: it counts the tokens"
    if any(len(word) > 1 for word in params.bad_words_token_ids or ()):
        return "bad_words: what is banned depends on the tokens before"
    return ""
