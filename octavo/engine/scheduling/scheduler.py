"""Decides what each step computes, and takes in what it yielded.

There is no prefill phase and no decode phase: every request has `num_computed_tokens` that catches
up with `num_tokens`, under a budget of tokens a step and of requests at once. Owns the requests'
tokens, counts and states. Reads no clock and measures nothing (time and costs are arguments), and
sees neither text nor arrays. Who goes first (policy), who may start (admission, batching) and how a
request comes onto the device and off it (placement) are collaborators. Source: continuous batching
(Orca, Yu et al. 2022), chunked prefill (Sarathi, Agrawal et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from octavo.engine.front.stop_texts import MakeStopTexts
from octavo.engine.kv.block_manager import BlockManager, Grant
from octavo.engine.requests.beam_search import BeamSearch
from octavo.engine.requests.request import EngineOutput, EngineRequest, Request, RequestStatus
from octavo.engine.requests.timings import Timekeeper
from octavo.engine.requests.token_row import Finish, TokenRow
from octavo.engine.scheduling.admission import (
    HELD_BACK,
    NO_BLOCKS,
    NO_PROMPT,
    OK,
    READING,
    Admission,
    Answer,
    Verdict,
)
from octavo.engine.scheduling.batching import Batching, Crowd, PromptStep
from octavo.engine.scheduling.multi_step import DecodeSteps
from octavo.engine.scheduling.placement import Placement
from octavo.engine.scheduling.policy import Policy
from octavo.engine.scheduling.step_builder import StepBuilder
from octavo.engine.scheduling.steps_in_flight import StepsInFlight
from octavo.engine.stats import EngineStats
from octavo.engine.step_costs import UNMEASURED, StepCosts
from octavo.step import RowResult, ScheduledRow, StepPlan, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold. Without `keeps_kv` every step computes all of a request's tokens
    again, for comparison.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_chunk: int | None
    """Most tokens of one request; None where prompts are not chunked."""
    keeps_kv: bool = True

    def chunk(self, policy: Policy) -> int:
        """Most tokens of one request in the step to come."""
        return (
            self.max_num_batched_tokens
            if self.max_chunk is None
            else policy.max_chunk(self.max_chunk)
        )


class Scheduler:
    """One token budget over running, then swapped, then waiting requests.

    A request that can never fit (its prompt and one token exceed the context or the whole KV cache)
    fails when it is added; any other is cut to what fits and then ends with "length". So the last
    running request always finds its blocks once the others have given theirs up, and preemption
    cannot run in circles.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        limits: StepLimits,
        admission: Admission,
        policy: Policy,
        batching: Batching,
        placement: Placement,
        decode_steps: DecodeSteps,
        stop_texts: MakeStopTexts | None = None,
    ) -> None:
        """`stop_texts`: for beam searches with stop strings; those of other requests are found by
        the front.
        """
        self.blocks = blocks
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._limits = limits
        self._admission = admission
        self._policy = policy
        self._batching = batching
        self._placement = placement
        self._decode_steps = decode_steps
        self._stop_texts = stop_texts
        self._num_seqs = 0
        """Rows that the running have, or may come to have."""
        self._in_flight = StepsInFlight()
        self._leaving: list[Request] = []
        """They have ended, but a step in flight computes them: what they hold is freed when it is
        back.
        """
        self._outputs: list[EngineOutput] = []
        """Final outputs made between steps: refused and aborted requests."""
        self._times = Timekeeper()
        self._prompt_since: float | None = None
        self._last_prompt = PromptStep()
        self._stats = EngineStats()

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._outputs or self.blocks.connector.has_work)

    @property
    def waiting(self) -> list[Request]:
        """In the order of the policy."""
        return list(self._policy.order())

    @property
    def next_to_run(self) -> str | None:
        """Who of those that do not run is to run before the others: swapped out, or waiting."""
        first = self.swapped[0] if self.swapped else next(self._policy.order(), None)
        return None if first is None else first.request_id

    @property
    def waits_for(self) -> str:
        """What kept the first of the waiting from starting in the last plan; "" where nobody
        waits."""
        return self._times.waits_for

    @property
    def waits_for_results(self) -> str:
        """Why the next plan cannot be made before a step in flight is back; "" where it can."""
        return self._in_flight.reason_to_wait(self.running)

    def pause_s(self, now: float) -> float:
        """For how long a step would do nothing, if nobody comes or goes: a batch may wait until it
        is full.
        """
        if (
            self.running
            or self.swapped
            or self._outputs
            or not self._requests
            or self.blocks.connector.has_work
        ):
            return 0.0
        return max(0.0, self._batching.opens_at(self._crowd(now)) - now)

    # -- requests come and go ----------------------------------------------------------------------

    def add(self, source: EngineRequest) -> None:
        """Queues a request. One that can never fit gets its final output, an error, at the next
        update.
        """
        width = source.params.beam_width
        limits = (
            self._admission.limits
            if width is None
            else self._admission.limits_of(self.blocks.capacity_of(width))
        )
        num_prompt_tokens = len(source.prompt_token_ids)
        max_num_tokens = limits.max_num_tokens(num_prompt_tokens, width or 1)
        stop_texts = (
            self._stop_texts(source.params)
            if self._stop_texts and width and source.params.stop_strings
            else None
        )
        request = Request(source, max_num_tokens=max_num_tokens, stop_texts=stop_texts)
        self._stats.num_added += 1
        self._stats.num_added_tokens += num_prompt_tokens
        self._times.arrived(request.watch)
        answer = limits.judge(num_prompt_tokens, width)
        if answer.verdict is Verdict.NEVER:
            self._outputs.append(self._final_output(request, Finish("error", error=answer.reason)))
            return
        self._requests[request.request_id] = request
        self._wait(request)
        if request.fork_of is None:
            self._placement.read_ahead(request, self._num_seqs, at_once=True)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks at once; an unknown one (it may have just finished)
        is left alone.
        """
        self._give_up(request_id, Finish("abort"))

    def fail(self, request_id: str, error: str) -> None:
        """`abort`, for a reason that is not the user's."""
        self._give_up(request_id, Finish("error", error=error))

    def _give_up(self, request_id: str, finish: Finish) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        self._outputs.append(self._finish(request, finish))

    # -- a step is planned -------------------------------------------------------------------------

    def schedule(self, now: float, costs: StepCosts = UNMEASURED) -> StepPlan:
        budget, chunk = self._limits.max_num_batched_tokens, self._limits.chunk(self._policy)
        builder = StepBuilder(now, costs, budget, chunk, runs_ahead=bool(self._in_flight))
        self._times.begin_step(now)
        if self._prompt_since is not None:
            self._last_prompt = PromptStep(now, now - self._prompt_since)
        builder.moves += self.blocks.begin_step()
        self._continue_running(builder)
        if not (builder.preempted or builder.is_short):
            self._return_swapped(builder)
            self._start_waiting(builder)
        return self._finish_draft(builder)

    def _continue_running(self, builder: StepBuilder) -> None:
        for request in list(self._policy.ranked(self.running)):
            if builder.budget == 0:
                break
            if (
                request.status is RequestStatus.RUNNING
            ):  # it may have been preempted for one before it
                self._compute(request, builder)

    def _compute(self, request: Request, builder: StepBuilder) -> None:
        """As many tokens of its rows as the budget has. A beam that has none waits for the
        others."""
        for row in request.rows:
            start = row.num_planned_tokens
            end = builder.end_of(request, row, start)
            if end == start:
                continue
            grant = self._make_room(request, row, start, end, builder)
            if grant is None:
                return
            if not row.is_on_worker:
                builder.add_new_row(request, row)
                grant = Grant(self.blocks.block_ids(row.request_id), moves=grant.moves)
            builder.add_row(request, row, start, end, grant)

    def _make_room(
        self, request: Request, row: TokenRow, start: int, end: int, builder: StepBuilder
    ) -> Grant | None:
        """Blocks for these tokens, others preempted where they are missing; None where the request
        itself has to go, or to wait.
        """
        while (grant := self.blocks.grow(row.request_id, start, end)) is None:
            if builder.runs_ahead:
                builder.is_short, builder.waits_for = True, NO_BLOCKS.reason
                return None
            victim = self._policy.victim(self.running)
            self._preempt(victim, builder)
            if victim is request:
                return None
        return grant

    def _preempt(self, request: Request, builder: StepBuilder) -> None:
        """Takes all of a request's blocks: swapped out, or to be computed again, first among the
        waiting.
        """
        self.running.remove(request)
        self._num_seqs -= request.num_seqs
        request.num_preemptions += 1
        self._times.preempted(request.watch)
        builder.preempted = True
        builder.waits_for = NO_BLOCKS.reason
        builder.drop_rows(request)
        moves = self._placement.swap_out(request, builder)
        if moves is None:
            self._start_over(request)
        else:
            request.swap_out()
            self.swapped.insert(0, request)
            builder.moves += moves
            builder.swapped_out.append(request)
            self._stats.num_swaps += 1
        self._stats.num_preemptions += 1

    def _return_swapped(self, builder: StepBuilder) -> None:
        for request in list(self._policy.ranked(self.swapped)):
            if builder.budget == 0 or self._num_seqs + request.num_seqs > self._limits.max_num_seqs:
                return
            if not self._placement.swap_in(request, builder, num_running=self._num_seqs):
                return
            self.swapped.remove(request)
            self._run(request, builder)

    def _start_waiting(self, builder: StepBuilder) -> None:
        """In the policy's order, as far as admission and blocks go. Whoever is swapped out comes
        first.
        """
        if self.swapped:
            builder.waits_for = NO_BLOCKS.reason
        if self.swapped or not len(self._policy):
            return
        builder.waits_for = HELD_BACK
        room = self._batching.room(self._crowd(builder.now))
        started: list[Request] = []
        for request in self._policy.order():
            answer = self._start(
                request,
                builder,
                room if started or self.running else min(room, 1) * self._limits.max_num_seqs,
            )
            if answer is OK:
                started.append(request)
                room -= request.num_seqs
                continue
            builder.waits_for = answer.reason
            if answer not in (NO_PROMPT, READING):
                break
        for request in started:
            self._leave(request)

    def _start(self, request: Request, builder: StepBuilder, room: int) -> Answer:
        """Runs it where it may; one that is of the batch already needs no more than a place."""
        parent = None if request.fork_of is None else self._requests.get(request.fork_of)
        if request.num_preemptions:
            room = self._limits.max_num_seqs - self._num_seqs
        elif parent is not None and parent.status is RequestStatus.RUNNING:
            room = self._batching.max_num_seqs - self._num_seqs
        answer = self._placement.start(
            request, parent, builder, room=room, num_running=self._num_seqs
        )
        if answer is OK:
            self._policy.started(request)
            self._run(request, builder)
        return answer

    def _run(self, request: Request, builder: StepBuilder) -> None:
        """To the running; it has blocks for as many tokens as the budget has."""
        request.fork_of = None
        request.status = RequestStatus.RUNNING
        if request.scheduled_ts is None:
            request.scheduled_ts = builder.now
        self._times.runs(request.watch)
        self.running.append(request)
        self._num_seqs += request.num_seqs
        self._compute(request, builder)

    def _finish_draft(self, builder: StepBuilder) -> StepPlan:
        freed_rows, connector = self._placement.take_freed_rows(), self.blocks.connector.end_step()
        runs_alone = not (self.swapped or len(self._policy) or self._outputs or self._in_flight)
        num_steps = (
            self._decode_steps.num_steps(builder, num_running=len(self.running))
            if runs_alone
            else 1
        )
        plan = StepPlan(
            self._stats.num_steps,
            freed_rows,
            builder.new_rows,
            builder.moves,
            builder.rows,
            connector,
            num_steps,
        )
        self._in_flight.add(builder)
        self._prompt_since = builder.now if builder.has_prompt else None
        self._stats.num_steps += 1
        self._times.planned(len(builder.rows), builder.waits_for if len(self._policy) else "")
        return plan

    def _crowd(self, now: float) -> Crowd:
        oldest = self._policy.oldest()
        return Crowd(
            now,
            num_running=self._num_seqs + sum(request.num_seqs for request in self.swapped),
            num_waiting=len(self._policy),
            arrival_time=now if oldest is None else oldest.source.arrival_time,
            last_prompt=self._last_prompt,
        )

    def _wait(self, request: Request, *, first: bool = False) -> None:
        self._policy.join(request, first=first)
        self._stats.num_waiting_tokens += request.num_tokens

    def _leave(self, request: Request) -> None:
        self._policy.leave(request)
        self._stats.num_waiting_tokens -= request.num_tokens

    def plan_failed(self, plan: StepPlan) -> None:
        """Nobody knows how far it was carried out: rows are freed again (twice does no harm), and
        what was swapped out starts over.

        The requests that were to be computed fail at `update`.
        """
        self._placement.free_again(self._in_flight.not_given_away(plan.freed_rows))
        self.blocks.connector.step_failed()
        for request in self._in_flight.oldest.swapped_out:
            if request.status is RequestStatus.SWAPPED:
                self.swapped.remove(request)
                self._start_over(request)

    def _start_over(self, request: Request) -> None:
        """Back to the front of the waiting, with nothing computed."""
        self._placement.free(request)
        request.start_over()
        self._policy.stopped(request)
        self._wait(request, first=True)

    # -- a step is taken in ------------------------------------------------------------------------

    def preview(self, rows: Sequence[RowResult], busy_s: float) -> list[EngineOutput]:
        """What `update` will say of the next decode step of the plan in flight, which ends no
        request and is not its last.
        """
        self._times.went_on(busy_s)
        owners = self._in_flight.oldest.owners
        return [
            self._output(request, row.token_ids, row.logprobs)
            for (request, _), row in zip(owners, rows, strict=True)
        ]

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Advances the requests of the oldest plan that is in flight, finishes and frees; returns
        what each of them got.
        """
        owners = self._in_flight.take().owners
        self._times.computed(result.busy_s, result.num_steps)
        self._stats.num_steps += result.num_steps - 1
        outputs, self._outputs = self._outputs, []
        self.blocks.connector.step_done(result.connector)
        any_finished = False
        for (request, row), scheduled, row_result in zip(
            owners, plan.rows, result.rows, strict=True
        ):
            if (
                request.status is RequestStatus.FINISHED
            ):  # one of its beams has failed, or a step that was taken in before ended it
                continue
            output = self._take(request, row, scheduled, row_result)
            if output is not None:
                outputs.append(output)
                any_finished = any_finished or output.finish_reason is not None
        if any_finished:
            self.running = [
                request for request in self.running if request.status is RequestStatus.RUNNING
            ]
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for request in leaving:
                self._free(request)
        self._stats.busy_s += result.busy_s
        return outputs

    def _take(
        self, request: Request, row: TokenRow, scheduled: ScheduledRow, result: RowResult
    ) -> EngineOutput | None:
        if result.failure is not None:
            return self._finish(request, Finish("error", error=result.failure))
        if result.prompt_logprobs:
            request.take_prompt_logprobs(scheduled.start + 1, result.prompt_logprobs)
        num_before = request.num_tokens
        finish = request.extend(result.token_ids) if request.search is None else None
        num_drawn = request.num_tokens - num_before
        row.num_computed_tokens = min(scheduled.start + result.num_kept, row.num_tokens)
        row.num_tokens_in_flight -= scheduled.num_tokens
        if self._limits.keeps_kv:
            self.blocks.record(
                row.request_id,
                row.token_ids,
                row.num_computed_tokens,
                salt=request.source.cache_salt,
            )
        elif scheduled.samples:
            row.num_computed_tokens = 0
        if not scheduled.samples:
            return None
        if request.search is not None:
            return self._take_candidates(request, request.search, row, result)
        return self._take_tokens(request, result, num_drawn, finish)

    def _take_candidates(
        self, request: Request, search: BeamSearch, row: TokenRow, result: RowResult
    ) -> EngineOutput | None:
        """Once all beams have yielded theirs, the next ones branch off; once the search is done,
        all that it has found.
        """
        rows = request.rows
        if not search.take(rows, row, result):
            return None
        if request.watch.first_token is None:
            self._times.yielded(request.watch)
            self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.generation_tokens += len(rows)
        self._policy.took(request, len(rows))
        self._placement.branch(rows, search.advance(rows))
        if not search.is_done:
            return None
        output = self._finish(request, search.finish())
        output.beams = search.best() or None
        request.describe_start(output)
        return output

    def _take_tokens(
        self, request: Request, result: RowResult, num_drawn: int, finish: Finish | None
    ) -> EngineOutput:
        """Of the result so many tokens, which the request has already; those after its end are
        nobody's.
        """
        if request.watch.first_token is None:
            self._times.yielded(request.watch)
        self._stats.generation_tokens += num_drawn
        self._policy.took(request, num_drawn)
        token_ids, logprobs = (
            result.token_ids[:num_drawn],
            result.logprobs and result.logprobs[:num_drawn],
        )
        if finish is None:
            output = self._output(request, token_ids, logprobs)
        else:
            output = self._finish(request, finish)
            output.token_ids, output.logprobs = token_ids, logprobs
        if request.num_output_tokens == num_drawn:
            self._stats.prompt_tokens += request.num_prompt_tokens
            request.describe_start(output)
        return output

    def _output(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> EngineOutput:
        """Of one that goes on, as far as this plane knows."""
        timings = (
            request.timings(self._times.so_far(request.watch))
            if request.params.stop_strings
            else None
        )
        return EngineOutput(request.request_id, token_ids, logprobs, timings=timings)

    def _finish(self, request: Request, finish: Finish) -> EngineOutput:
        """Frees all that a request holds, if need be later; out of the running the caller takes
        it."""
        if request.status is RequestStatus.WAITING:
            self._leave(request)
        else:
            self._policy.stopped(request)
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self._num_seqs -= request.num_seqs
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        if finish.reason == "error":
            self._placement.forget(request)
        self._free(request)
        return self._final_output(request, finish)

    def _free(self, request: Request) -> None:
        """Not while a step in flight writes to its blocks and reads its row."""
        if self._in_flight.computes(request):
            self._leaving.append(request)
        else:
            self._placement.free(request)

    def _final_output(self, request: Request, finish: Finish) -> EngineOutput:
        return request.final_output(finish, self._times.so_far(request.watch))

    def stats(self) -> EngineStats:
        """A snapshot."""
        stats = self._stats
        stats.num_running = self._num_seqs
        stats.num_swapped = len(self.swapped)
        stats.num_waiting = len(self._policy)
        stats.num_blocks = self.blocks.num_blocks
        stats.num_used_blocks = self.blocks.num_blocks - self.blocks.num_free_blocks
        stats.num_host_blocks = self.blocks.host.num_used_blocks
        stats.groups = [pool.counts() for pool in self.blocks.pools]
        stats.prefix_query_tokens = self.blocks.num_query_tokens
        stats.prefix_hit_tokens = self.blocks.num_hit_tokens
        stats.external_query_tokens = self.blocks.num_external_query_tokens
        stats.external_hit_tokens = self.blocks.num_external_hit_tokens
        stats.connector = self.blocks.connector.snapshot()
        return msgspec.structs.replace(stats)
