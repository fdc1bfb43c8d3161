"""Decides what each step computes, and takes in what it yielded.

There is no prefill phase and no decode phase: every request has `num_computed_tokens` that catches up with `num_tokens`, under a budget
of tokens a step and of requests at once. Owns the requests' tokens, counts and states. Reads no clock and measures nothing (time and
rates are arguments), and sees neither text nor arrays. Who goes first (policy), who may start (admission, batching) and how blocks are
given up (preemption) are collaborators. Source: continuous batching (Orca, Yu et al. 2022), chunked prefill (Sarathi, Agrawal et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from octavo.engine.admission import HELD_BACK, NO_BLOCKS, NO_PROMPT, OK, READING, Admission, Answer, Verdict
from octavo.engine.batching import Batching, Crowd, PromptStep
from octavo.engine.block_manager import HERE, BlockManager, Grant, Nearer
from octavo.engine.draft import Draft
from octavo.engine.policy import Policy
from octavo.engine.preemption import Preemption
from octavo.engine.rates import UNMEASURED, Rates
from octavo.engine.request import EngineOutput, EngineRequest, Finish, Request, RequestStatus
from octavo.engine.stats import EngineStats
from octavo.engine.timings import Timekeeper
from octavo.outputs import Timings
from octavo.step import RowResult, ScheduledRow, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold. Without `keeps_kv` every step computes all of a request's tokens again, for comparison."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_chunk: int | None
    """Most tokens of one request; None where prompts are not chunked."""
    keeps_kv: bool = True

    def chunk(self, policy: Policy) -> int:
        """Most tokens of one request in the step to come."""
        return self.max_num_batched_tokens if self.max_chunk is None else policy.max_chunk(self.max_chunk)


class Scheduler:
    """One token budget over running, then swapped, then waiting requests.

    A request that can never fit (its prompt and one token exceed the context or the whole KV cache) fails when it is added; any other
    is cut to what fits and then ends with "length". So the last running request always finds its blocks once the others have given
    theirs up, and preemption cannot run in circles.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        limits: StepLimits,
        admission: Admission,
        policy: Policy,
        batching: Batching,
        preemption: Preemption,
    ) -> None:
        self.blocks = blocks
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._limits = limits
        self._admission = admission
        self._policy = policy
        self._batching = batching
        self._preemption = preemption
        self._freed_rows: list[str] = []
        self._outputs: list[EngineOutput] = []
        """Final outputs made between steps: refused and aborted requests."""
        self._swapped_out: list[Request] = []
        """By the last plan."""
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
        """What kept the first of the waiting from starting in the last plan; "" where nobody waits."""
        return self._times.waits_for

    def pause_s(self, now: float) -> float:
        """For how long a step would do nothing, if nobody comes or goes: a batch may wait until it is full."""
        if self.running or self.swapped or self._outputs or not self._requests or self.blocks.connector.has_work:
            return 0.0
        return max(0.0, self._batching.opens_at(self._crowd(now)) - now)

    # -- requests come and go -------------------------------------------------------------------------------------------

    def add(self, source: EngineRequest) -> None:
        """Queues a request. One that can never fit gets its final output, an error, at the next update."""
        request = Request(source, max_num_tokens=self._admission.limits.max_num_tokens)
        self._stats.num_added += 1
        self._stats.num_added_tokens += request.num_prompt_tokens
        self._times.arrived(request.watch)
        answer = self._admission.judge(request.num_prompt_tokens)
        if answer.verdict is Verdict.NEVER:
            self._outputs.append(self._final_output(request, Finish("error", error=answer.reason)))
            return
        self._requests[request.request_id] = request
        self._wait(request)
        if request.fork_of is None:
            self._read_ahead(request, at_once=True)

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks at once; an unknown one (it may have just finished) is left alone."""
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

    # -- a step is planned ----------------------------------------------------------------------------------------------

    def schedule(self, now: float, rates: Rates = UNMEASURED) -> StepPlan:
        draft = Draft(now, rates, self._limits.max_num_batched_tokens, self._limits.chunk(self._policy))
        self._times.begin_step(now)
        if self._prompt_since is not None:
            self._last_prompt = PromptStep(now, now - self._prompt_since)
        draft.moves += self.blocks.begin_step()
        self._continue_running(draft)
        if not draft.preempted:
            self._return_swapped(draft)
            self._start_waiting(draft)
        return self._finish_draft(draft)

    def _continue_running(self, draft: Draft) -> None:
        for request in list(self._policy.ranked(self.running)):
            if draft.budget == 0:
                break
            if request.status is RequestStatus.RUNNING:  # it may have been preempted for one before it
                end = draft.end_of(request)
                grant = self._make_room(request, end, draft)
                if grant is not None:
                    draft.add_row(request, end, grant)

    def _make_room(self, request: Request, end: int, draft: Draft) -> Grant | None:
        """Blocks up to the token `end`, others preempted where they are missing; None where the request itself had to go."""
        while (grant := self.blocks.grow(request.request_id, request.num_computed_tokens, end)) is None:
            victim = self._policy.victim(self.running)
            self._preempt(victim, draft)
            if victim is request:
                return None
        return grant

    def _preempt(self, request: Request, draft: Draft) -> None:
        """Takes all of a request's blocks: swapped out, or to be computed again, first among the waiting."""
        self.running.remove(request)
        request.num_preemptions += 1
        self._times.preempted(request.watch)
        draft.preempted = True
        draft.waits_for = NO_BLOCKS.reason
        draft.drop_row(request)
        moves = self._preemption.swap_out(request, draft.rates)
        if moves is None:
            self._start_over(request)
        else:
            request.swap_out()
            self.swapped.insert(0, request)
            draft.moves += moves
            draft.swapped_out.append(request)
            self._stats.num_swaps += 1
        self._freed_rows.append(request.request_id)
        self._stats.num_preemptions += 1

    def _return_swapped(self, draft: Draft) -> None:
        for request in list(self._policy.ranked(self.swapped)):
            if draft.budget == 0 or len(self.running) == self._limits.max_num_seqs:
                return
            moves = self.blocks.swap_in(
                request.request_id,
                request.num_computed_tokens,
                request.num_tokens,
                reserve=self._admission.reserve(len(self.running)),
                step_tokens=draft.budget,
            )
            if moves is None:
                return
            draft.moves += moves
            self.swapped.remove(request)
            self._run(request, draft)

    def _start_waiting(self, draft: Draft) -> None:
        """In the policy's order, as far as admission and blocks go. Whoever is swapped out comes first."""
        if self.swapped:
            draft.waits_for = NO_BLOCKS.reason
        if self.swapped or not len(self._policy):
            return
        draft.waits_for = HELD_BACK
        room = self._batching.room(self._crowd(draft.now))
        started: list[Request] = []
        for request in self._policy.order():
            answer = self._start(request, draft, room - len(started))
            if answer is OK:
                started.append(request)
                continue
            draft.waits_for = answer.reason
            if answer not in (NO_PROMPT, READING):
                break
        for request in started:
            self._leave(request)

    def _start(self, request: Request, draft: Draft, room: int) -> Answer:
        """Runs it where it may: by itself, or sharing the blocks of the sample whose prompt it has."""
        parent = self._parent_of(request)
        if parent is not None and not self._has_prompt(parent):
            return NO_PROMPT
        nearer = HERE if parent is not None else self._read_ahead(request, at_once=not self.running)
        draft.moves += nearer.moves
        if nearer.is_waiting:
            return READING
        if request.num_preemptions:  # it is of the batch already
            room = self._limits.max_num_seqs - len(self.running)
        answer = self._admission.may_start(request.num_tokens, budget=draft.budget, room=room)
        if answer is not OK:
            return answer
        grant = self._take_blocks(request, draft) if parent is None else self._fork(request, parent)
        if grant is None:
            return NO_BLOCKS
        draft.moves += grant.moves
        self._policy.started(request)
        self._run(request, draft)
        return OK

    def _parent_of(self, request: Request) -> Request | None:
        """Whose blocks the request is to share; None where it has none, or that one ended or no longer has what is to be shared."""
        if request.fork_of is None or not self.blocks.shares_blocks:
            return None
        parent = self._requests.get(request.fork_of)
        if parent is None or (parent.status is RequestStatus.WAITING and parent.num_preemptions):
            return None
        if self._has_prompt(parent) and not self.blocks.can_fork(parent.request_id, request.num_prompt_tokens - 1):
            return None
        return parent

    def _has_prompt(self, parent: Request) -> bool:
        """On the device, but for its last token. One that is swapped out is waited for."""
        return parent.status is RequestStatus.RUNNING and parent.num_computed_tokens >= parent.num_prompt_tokens - 1

    def _read_ahead(self, request: Request, *, at_once: bool) -> Nearer:
        return self.blocks.read_ahead(
            request.request_id,
            request.token_ids,
            salt=request.source.cache_salt,
            max_cached_tokens=request.max_cached_tokens,
            reserve=self._admission.reserve(len(self.running)),
            at_once=at_once,
        )

    def _take_blocks(self, request: Request, draft: Draft) -> Grant | None:
        start = self.blocks.start(
            request.request_id,
            request.token_ids,
            salt=request.source.cache_salt,
            max_cached_tokens=request.max_cached_tokens,
            reserve=self._admission.reserve(len(self.running)),
            step_tokens=draft.budget,
        )
        if start is None:
            return None
        request.num_computed_tokens = start.num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = start.num_cached_tokens
        return Grant(moves=start.moves)

    def _fork(self, request: Request, parent: Request) -> Grant | None:
        """Shares the parent's prompt, of which the last token is computed again: its logits are wanted, and its block copied."""
        num_computed = request.num_prompt_tokens - 1
        self.blocks.fork(parent.request_id, request.request_id, num_computed)
        grant = self.blocks.grow(request.request_id, num_computed, request.num_tokens)
        if grant is None:
            self.blocks.free(request.request_id)
            return None
        request.num_computed_tokens = request.num_cached_tokens = num_computed
        return grant

    def _run(self, request: Request, draft: Draft) -> None:
        """To the running, with a new row on the worker and as many tokens as the budget has."""
        request.fork_of = None
        request.status = RequestStatus.RUNNING
        if request.scheduled_ts is None:
            request.scheduled_ts = draft.now
        self._times.runs(request.watch)
        self.running.append(request)
        draft.add_new_row(request)
        draft.add_row(request, draft.end_of(request), Grant(self.blocks.block_ids(request.request_id)))

    def _finish_draft(self, draft: Draft) -> StepPlan:
        plan = StepPlan(self._stats.num_steps, self._freed_rows, draft.new_rows, draft.moves, draft.rows, self.blocks.connector.end_step())
        self._freed_rows, self._swapped_out = [], draft.swapped_out
        self._prompt_since = draft.now if draft.has_prompt else None
        self._stats.num_steps += 1
        self._times.planned(len(draft.rows), draft.waits_for if len(self._policy) else "")
        return plan

    def _crowd(self, now: float) -> Crowd:
        first = next(self._policy.order(), None)
        return Crowd(
            now,
            num_running=len(self.running) + len(self.swapped),
            num_waiting=len(self._policy),
            arrival_time=now if first is None else first.source.arrival_time,
            last_prompt=self._last_prompt,
        )

    def _wait(self, request: Request, *, first: bool = False) -> None:
        self._policy.join(request, first=first)
        self._stats.num_waiting_tokens += request.num_tokens

    def _leave(self, request: Request) -> None:
        self._policy.leave(request)
        self._stats.num_waiting_tokens -= request.num_tokens

    def plan_failed(self, plan: StepPlan) -> None:
        """Nobody knows how far it was carried out: rows are freed again (twice does no harm), and what was swapped out starts over.

        The requests that were to be computed fail at `update`.
        """
        self._freed_rows += plan.freed_rows
        self.blocks.connector.step_failed()
        for request in self._swapped_out:
            if request.status is RequestStatus.SWAPPED:
                self.swapped.remove(request)
                self._start_over(request)

    def _start_over(self, request: Request) -> None:
        """Back to the front of the waiting, with nothing computed."""
        self.blocks.free(request.request_id)
        request.start_over()
        self._policy.stopped(request)
        self._wait(request, first=True)

    # -- a step is taken in ---------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Advances the plan's requests, finishes and frees; returns what each of them got."""
        self._times.computed(result.busy_s)
        outputs, self._outputs = self._outputs, []
        self.blocks.connector.step_done(result.connector)
        any_finished = False
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = self._requests[row.request_id]
            output = self._take(request, row, row_result)
            if output is not None:
                outputs.append(output)
                any_finished = any_finished or output.finish_reason is not None
        if any_finished:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        self._stats.busy_s += result.busy_s
        return outputs

    def _take(self, request: Request, row: ScheduledRow, result: RowResult) -> EngineOutput | None:
        if result.failure is not None:
            return self._finish(request, Finish("error", error=result.failure))
        if result.prompt_logprobs:
            request.take_prompt_logprobs(row.start + 1, result.prompt_logprobs)
        request.num_computed_tokens = row.start + row.num_tokens
        if self._limits.keeps_kv:
            self.blocks.record(request.request_id, request.token_ids, request.num_computed_tokens, salt=request.source.cache_salt)
        elif row.samples:
            request.num_computed_tokens = 0
        return self._take_tokens(request, result) if row.samples else None

    def _take_tokens(self, request: Request, result: RowResult) -> EngineOutput:
        is_first = request.num_output_tokens == 0
        if request.watch.first_token is None:
            self._times.yielded(request.watch)
        finish = None
        num_taken = 0
        for token_id in result.token_ids:
            num_taken += 1
            finish = request.append(token_id)
            if finish is not None:
                break
        self._stats.generation_tokens += num_taken
        self._policy.took(request, num_taken)
        output = EngineOutput(request.request_id) if finish is None else self._finish(request, finish)
        output.token_ids = result.token_ids[:num_taken]
        output.logprobs = result.logprobs
        if finish is None and request.params.stop_strings:
            output.timings = self._timings(request)
        if is_first:
            self._stats.prompt_tokens += request.num_prompt_tokens
            self._describe_start(request, output)
        return output

    def _describe_start(self, request: Request, output: EngineOutput) -> None:
        output.num_cached_tokens = request.num_cached_tokens
        output.scheduled_ts = request.scheduled_ts
        if request.params.prompt_logprobs is not None:
            output.prompt_logprobs = request.prompt_logprobs

    def _finish(self, request: Request, finish: Finish) -> EngineOutput:
        """Frees all that a request holds; out of the running the caller takes it."""
        if request.status is RequestStatus.WAITING:
            self._leave(request)
        else:
            self._policy.stopped(request)
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]
        self.blocks.free(request.request_id, forget=finish.reason == "error")
        self._freed_rows.append(request.request_id)
        return self._final_output(request, finish)

    def _final_output(self, request: Request, finish: Finish) -> EngineOutput:
        return EngineOutput(
            request.request_id,
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            error=finish.error,
            num_preemptions=request.num_preemptions,
            num_swaps=request.num_swaps,
            timings=self._timings(request),
        )

    def _timings(self, request: Request) -> Timings:
        return replace(
            self._times.so_far(request.watch),
            cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            num_swaps=request.num_swaps,
        )

    def stats(self) -> EngineStats:
        """A snapshot."""
        stats = self._stats
        stats.num_running = len(self.running)
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
