"""Converts EngineOutputs to RequestOutputs: text, stop strings, logprobs, and the samples of each
request.

Owns the text so far (Detokenizer). Token ids are detokenized when the text is read, or immediately
if a stop string may match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from octavo.api.errors import InvalidRequest
from octavo.api.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Timings,
)
from octavo.api.pooling_params import RequestParams
from octavo.api.sampling_params import SamplingParams
from octavo.engine.protocol.outputs import BeamOutput, EngineOutput
from octavo.engine.protocol.step import TokenLogprobs
from octavo.frontend.input_processor import ParentRequest
from octavo.text.detokenizer import Detokenizer
from octavo.text.ports import Tokenizer

KEPT_S = 60.0
"""Seconds for which a finished request is kept."""
MAX_KEPT = 256
MAX_KEPT_TOKENS = 1 << 20
"""Maximum number of tokens of all kept requests, including prompts."""


@dataclass(slots=True)
class Sample:
    """State of one sample of a request."""

    index: int
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    num_detokenized: int = 0
    num_given: int = 0
    """Number of tokens that were returned to a reader of deltas."""
    end_given: bool = False
    """Whether the end of the sample was returned to a reader of deltas."""

    def text(self) -> str:
        """Text so far; "" if the request does not detokenize."""
        self.catch_up()
        finished = self.finish_reason is not None
        return "" if self.detokenizer is None else self.detokenizer.text(finished=finished)

    def change_stops(self, params: SamplingParams) -> None:
        """Changes the stop strings for future tokens."""
        self.catch_up()
        if self.detokenizer is not None:
            self.detokenizer.change_stops(params)

    def catch_up(self, *, hide_last: bool = False) -> str | None:
        """Detokenizes new tokens. Returns the stop string that ends the text, None if there is
        none. With `hide_last`, the last token is not part of the text.
        """
        if self.detokenizer is None:
            return None
        end = len(self.token_ids) - hide_last
        stop = (
            self.detokenizer.push(self.token_ids[self.num_detokenized : end])
            if end > self.num_detokenized
            else None
        )
        if stop is not None:
            # Tokens computed after the stop string are discarded.
            del self.token_ids[self.detokenizer.num_tokens :]
        self.num_detokenized = len(self.token_ids)
        return stop


@dataclass(slots=True)
class RequestState:
    """State of a request between its arrival and its final output."""

    request: ParentRequest
    samples: list[Sample]
    num_unfinished: int
    metrics: RequestMetrics
    is_read_at_end: bool = False
    """Whether outputs have no samples before the end: ranked samples are selected when all have
    finished, and beams are found then.
    """
    ends_by_text: bool = False
    """Whether a stop string may end a sample."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    pooled: bytes | None = None
    """Pooled row of a finished pooling request."""
    timings: list[Timings] = field(default_factory=list)
    """Timings of the finished samples."""
    ended_at: float = 0.0
    """Time of its end on the monotonic clock, in seconds; 0 before."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of its longest sample."""
        return max((len(sample.token_ids) for sample in self.samples), default=0)

    @property
    def num_tokens(self) -> int:
        """Number of its tokens: prompt and all samples."""
        num_tokens = len(self.request.prompt_token_ids)
        for sample in self.samples:
            num_tokens += len(sample.token_ids)
        return num_tokens

    def get_returned(self) -> list[Sample]:
        """Returns the samples that the user receives: by index, or if they are ranked, best
        first.
        """
        if not self.request.params.is_ranked:
            return self.samples
        ranked = sorted(self.samples, key=lambda sample: -(sample.cumulative_logprob or 0.0))
        return [
            replace(sample, index=index)
            for index, sample in enumerate(ranked[: self.request.params.n])
        ]


class RecentRequests:
    """Recently finished requests by id, oldest first; kept so that they can be forked."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, RequestState] = OrderedDict()
        self._num_tokens = 0

    def add(self, request_id: str, request: RequestState) -> None:
        """Adds a request, replacing an earlier one with the same id, and removes the oldest ones
        beyond the limit.
        """
        if request_id in self._kept:
            self.drop(request_id)
        self._kept[request_id] = request
        self._num_tokens += request.num_tokens
        self._sweep(request.ended_at)

    def find(self, request_id: str, now: float) -> RequestState | None:
        """Returns a request that finished within the last KEPT_S seconds. Returns None if there is
        none.
        """
        self._sweep(now)
        return self._kept.get(request_id)

    def drop(self, request_id: str) -> None:
        removed = self._kept.pop(request_id, None)
        if removed is not None:
            self._num_tokens -= removed.num_tokens

    def all(self, now: float) -> list[RequestState]:
        """Returns all requests that finished within the last KEPT_S seconds."""
        self._sweep(now)
        return list(self._kept.values())

    def _sweep(self, now: float) -> None:
        while self._kept:
            request_id, oldest = next(iter(self._kept.items()))
            fits = len(self._kept) <= MAX_KEPT and self._num_tokens <= MAX_KEPT_TOKENS
            if fits and oldest.ended_at >= now - KEPT_S:
                return
            self.drop(request_id)


@dataclass(frozen=True, slots=True)
class AbortedRequest:
    """Progress of a request that was aborted before its end."""

    num_prompt_tokens: int
    metrics: RequestMetrics


@dataclass(slots=True)
class StepEffects:
    """Effects of one step's outputs."""

    changed: dict[str, bool] = field(default_factory=dict)
    """Ids of requests with a new output; True if it is the final one."""
    abort_ids: list[str] = field(default_factory=list)
    """Ids of core requests to abort because a stop string ended them."""


class OutputProcessor:
    """Keeps the state of every request from its arrival to its final output."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, RequestState] = {}
        self._samples: dict[str, tuple[RequestState, Sample]] = {}
        """Unfinished samples and their requests, by core request id."""
        self._recent = RecentRequests()
        self.last: RequestState | None = None
        """The request that finished last."""

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished core requests."""
        return len(self._samples)

    def add(self, request: ParentRequest) -> None:
        if request.request_id in self._states:
            raise InvalidRequest(
                f"request_id: {request.request_id!r} is in use by an unfinished request",
                param="request_id",
            )
        params = request.params
        is_ranked = params.is_ranked
        samples: list[Sample] = []
        state = RequestState(
            request,
            samples,
            len(request.samples),
            RequestMetrics(arrival_time=request.arrival_time),
            is_read_at_end=is_ranked or params.beam_width is not None,
            ends_by_text=params.ends_by_text,
        )
        self._states[request.request_id] = state
        self._recent.drop(request.request_id)
        for engine_request in request.samples:
            sample = self._make_sample(request, engine_request.sample_index, is_ranked=is_ranked)
            samples.append(sample)
            self._samples[engine_request.request_id] = (state, sample)

    def unfinished_ids(self, request_id: str) -> list[str]:
        """Returns the ids of a request's unfinished core requests; [] for an unknown request."""
        state = self._states.get(request_id)
        return (
            []
            if state is None
            else [
                entry.request_id
                for entry in state.request.samples
                if entry.request_id in self._samples
            ]
        )

    def lost(self, request_id: str) -> AbortedRequest | None:
        """Returns the progress of a request that is about to be aborted. Returns None if it is
        unknown.
        """
        state = self._states.get(request_id)
        if state is None:
            return None
        return AbortedRequest(len(state.request.prompt_token_ids), state.metrics)

    def unfinished(self) -> list[RequestState]:
        """Returns the requests with a waiting or running sample, oldest first."""
        return [state for state in self._states.values() if state.num_unfinished]

    def find(self, request_id: str, now: float) -> RequestState | None:
        """Returns a waiting, running or recently finished request. Returns None if it is
        unknown.
        """
        return self._states.get(request_id) or self._recent.find(request_id, now)

    def recent(self, now: float) -> list[RequestState]:
        """Returns the recently finished requests."""
        ended = [state for state in self._states.values() if not state.num_unfinished]
        return ended + self._recent.all(now)

    def name_of(self, core_id: str) -> tuple[str, int] | None:
        """Returns the request id and the sample index for a core request id. Returns None if the
        sample has ended.
        """
        entry = self._samples.get(core_id)
        return None if entry is None else (entry[0].request.request_id, entry[1].index)

    def change(self, request: ParentRequest) -> None:
        """Replaces an unfinished request by a changed one with the same id."""
        state = self._states[request.request_id]
        if request.params.stop_strings != state.request.params.stop_strings:
            for sample in state.samples:
                sample.change_stops(request.sampling_params)
        state.request, state.ends_by_text = request, request.params.ends_by_text

    def is_finished(self, request_id: str) -> bool:
        """Returns whether all samples of a request have finished and its final output has not been
        read.
        """
        return self._states[request_id].num_unfinished == 0

    def process(self, outputs: Iterable[EngineOutput], now: float) -> StepEffects:
        """Adds a step's outputs to their requests; ignores outputs of finished requests."""
        effects = StepEffects()
        for output in outputs:
            entry = self._samples.get(output.request_id)
            if entry is not None:
                state, sample = entry
                self._update(state, sample, output, now, effects)
                finished = state.num_unfinished == 0
                if finished or not state.is_read_at_end:
                    effects.changed[state.request.request_id] = finished
        return effects

    def output(self, request_id: str, *, only_new: bool = False) -> RequestOutput:
        """Returns a copy of a request's output so far, or with `only_new` the part since the last
        call. The final output is returned once; this removes the request.
        """
        state = self._states[request_id]
        finished = state.num_unfinished == 0
        if finished:
            del self._states[request_id]
        request = state.request
        merged = None
        if finished and len(state.timings) > 1:
            merged = Timings.merged(state.timings)
        request_output = RequestOutput(
            request_id=request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=(
                list(map(partial(_make_completion, only_new=only_new), state.get_returned()))
                if finished or not state.is_read_at_end
                else []
            ),
            finished=finished,
            prompt_logprobs=state.prompt_logprobs,
            num_cached_tokens=state.num_cached_tokens,
            metrics=state.metrics,
            error=state.error,
            pooled=state.pooled,
            lora_request=request.lora_request,
            timings=state.timings[0] if finished and len(state.timings) == 1 else merged,
        )
        if finished:
            samples = [replace(sample, logprobs=None) for sample in state.samples]
            kept = replace(state, samples=samples, prompt_logprobs=None)
            self._recent.add(request_id, kept)
            self.last = kept
        return request_output

    def discard(self, request_id: str) -> None:
        """Removes a request whose outputs are no longer read."""
        state = self._states.pop(request_id, None)
        for sample in state.request.samples if state is not None else ():
            self._samples.pop(sample.request_id, None)

    def _make_detokenizer(self, request: ParentRequest) -> Detokenizer | None:
        """Returns the detokenizer of a sample. Returns None if the request does not detokenize."""
        params = request.params
        if self._tokenizer is None or not isinstance(params, SamplingParams):
            return None
        if not params.detokenize:
            return None
        return Detokenizer(self._tokenizer, params, request.samples[0].prompt_token_ids)

    def _make_sample(
        self, request: ParentRequest, index: int, *, is_ranked: bool = False
    ) -> Sample:
        params = request.params
        sample = Sample(index, self._make_detokenizer(request))
        if params.logprobs is not None:
            sample.logprobs = []
        if params.logprobs is not None or is_ranked:
            sample.cumulative_logprob = 0.0
        return sample

    def _update(
        self,
        state: RequestState,
        sample: Sample,
        output: EngineOutput,
        now: float,
        effects: StepEffects,
    ) -> None:
        if output.finish_reason is not None:
            sample.finish_reason, sample.stop_reason = output.finish_reason, output.stop_reason
            state.error = state.error or output.error
        num_kept = len(output.token_ids)
        if num_kept:
            sample.token_ids += output.token_ids
            # Stop strings may end the text, and a stop token is not part of it.
            if state.ends_by_text or output.finish_reason == "stop":
                num_kept = self._search_stop(state.request.params, sample, output, effects)
        if num_kept or output.pooled is not None or output.beams is not None:
            metrics = state.metrics
            if not metrics.token_times or metrics.token_times[-1] != now:
                metrics.token_times.append(now)
            if output.scheduled_ts is not None or output.prompt_logprobs is not None:
                self._add_start(state, output)
            metrics.num_generation_tokens += num_kept
            if output.logprobs is not None and sample.cumulative_logprob is not None:
                self._add_logprobs(sample, output.logprobs[:num_kept])
            if output.beams is not None:
                self._add_beams(state, output.beams)
            state.pooled = output.pooled
        if sample.finish_reason is not None:
            if output.timings is not None:
                state.timings.append(output.timings)
                state.metrics.num_preemptions += output.timings.num_preemptions
            del self._samples[output.request_id]
            state.num_unfinished -= 1
            state.ended_at = now

    def _search_stop(
        self, params: RequestParams, sample: Sample, output: EngineOutput, effects: StepEffects
    ) -> int:
        """Ends the sample if its new tokens complete a stop string, and removes the tokens after
        it; returns the number of kept tokens.
        """
        num_before = len(sample.token_ids) - len(output.token_ids)
        by_token = output.finish_reason == "stop" and not params.include_stop_str_in_output
        if not (params.ends_by_text or by_token):
            return len(output.token_ids)
        stop = sample.catch_up(hide_last=by_token)
        if stop is not None:
            if output.finish_reason is None:
                effects.abort_ids.append(output.request_id)
            sample.finish_reason, sample.stop_reason = "stop", stop
        return len(sample.token_ids) - num_before

    def _add_logprobs(self, sample: Sample, logprobs: list[TokenLogprobs]) -> None:
        assert sample.cumulative_logprob is not None
        sample.cumulative_logprob += sum(entry.logprobs[0] for entry in logprobs)
        if sample.logprobs is not None:
            sample.logprobs += map(self._readable, logprobs)

    def _add_beams(self, state: RequestState, beams: list[BeamOutput]) -> None:
        """Replaces the single sample of a beam search by the found sequences."""
        params = state.request.params
        state.samples = [self._make_sample(state.request, index) for index in range(len(beams))]
        for sample, beam in zip(state.samples, beams, strict=True):
            sample.token_ids, sample.score, sample.cumulative_logprob = (
                beam.token_ids,
                beam.score,
                beam.cumulative_logprob,
            )
            if sample.logprobs is not None:
                sample.logprobs += map(self._readable, beam.logprobs)
            sample.finish_reason, sample.stop_reason = beam.finish_reason, beam.stop_reason
            by_token = beam.finish_reason == "stop" and not isinstance(beam.stop_reason, str)
            sample.catch_up(hide_last=by_token and not params.include_stop_str_in_output)
            state.metrics.num_generation_tokens += len(beam.token_ids)

    def _add_start(self, state: RequestState, output: EngineOutput) -> None:
        """Adds the metadata of a sample's first output. The times are those of the first sample."""
        if state.metrics.scheduled_ts is None:
            state.metrics.scheduled_ts = output.scheduled_ts
            state.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            state.prompt_logprobs = [
                *[None] * state.request.params.first_prompt_logprob,
                *map(self._readable, output.prompt_logprobs),
            ]

    def _readable(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        text = self._tokenizer.token_text if self._tokenizer is not None else lambda _: None
        by_token: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(
            entry.token_ids, entry.logprobs, entry.ranks, strict=True
        ):
            if token_id not in by_token:
                by_token[token_id] = Logprob(logprob, rank, text(token_id))
        return by_token


def _make_completion(sample: Sample, *, only_new: bool) -> CompletionOutput:
    """Returns a sample's output so far, or with `only_new` the part since the last call."""
    sample.catch_up()
    detokenizer, finished = sample.detokenizer, sample.finish_reason is not None
    start, text = 0, ""
    if only_new:
        start, sample.num_given = sample.num_given, len(sample.token_ids)
        if detokenizer is not None and not sample.end_given:
            text = detokenizer.delta(finished=finished)
        sample.end_given = finished
    elif detokenizer is not None:
        text = detokenizer.text(finished=finished)
    return CompletionOutput(
        index=sample.index,
        text=text,
        token_ids=sample.token_ids[start:],
        cumulative_logprob=sample.cumulative_logprob,
        logprobs=None if sample.logprobs is None else sample.logprobs[start:],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        score=sample.score,
        num_reasoning_tokens=0 if detokenizer is None else detokenizer.num_reasoning_tokens,
    )
