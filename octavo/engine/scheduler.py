"""Decides what each step computes, and takes in what it yielded.

There is no prefill phase and no decode phase: every request has `num_computed_tokens` that catches up with `num_tokens`, under a budget
of tokens a step and of requests at once. Owns the requests' tokens, counts and states. Reads no clock (time is an argument) and
sees neither text nor arrays. Source: continuous batching (Orca, Yu et al. 2022), chunked prefill (Sarathi, Agrawal et al. 2023).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from octavo.engine.block_manager import BlockManager
from octavo.engine.policy import FirstComeFirstServed, Policy
from octavo.engine.request import EngineOutput, EngineRequest, Finish, Request, RequestStatus
from octavo.engine.stats import EngineStats
from octavo.step import BlockMove, NewRow, RowResult, ScheduledRow, StepPlan, StepResult


@dataclass(slots=True)
class Draft:
    """A step being composed."""

    now: float
    budget: int
    """Tokens that may still be added."""
    rows: list[ScheduledRow] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """One token budget over running, then waiting requests.

    A request that can never fit (its prompt and one token exceed the context or the whole KV cache) fails when it is added; any other
    is cut to what fits and then ends with "length". So the oldest running request always finds its blocks once the younger ones
    have given theirs up, and preemption cannot run in circles.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        policy: Policy | None = None,
    ) -> None:
        self.blocks = blocks
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._policy = policy or FirstComeFirstServed()
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._freed_rows: list[str] = []
        self._outputs: list[EngineOutput] = []
        """Final outputs made between steps: refused and aborted requests."""
        self._stats = EngineStats(num_blocks=blocks.num_blocks)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._outputs)

    # -- requests come and go -------------------------------------------------------------------------------------------

    def add(self, source: EngineRequest) -> None:
        """Queues a request. One that can never fit gets its final output, an error, at the next update."""
        limit = min(self._max_model_len, self.blocks.capacity_tokens)
        request = Request(source, max_num_tokens=limit)
        if request.num_prompt_tokens + 1 > limit:
            got = f"prompt: got {request.num_prompt_tokens} tokens"
            error = f"{got}, allowed are at most {limit - 1} (the context, or the KV cache, is {limit})"
            self._outputs.append(self._final_output(request, Finish("error", error=error)))
            return
        self._requests[request.request_id] = request
        self.waiting[request.request_id] = request

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks at once; an unknown one (it may have just finished) is left alone."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.status is RequestStatus.WAITING:
            del self.waiting[request_id]
        else:
            self.running.remove(request)
        self._outputs.append(self._finish(request, Finish("abort")))

    # -- a step is planned ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        draft = Draft(now, self._max_num_batched_tokens)
        self._continue_running(draft)
        if not draft.preempted:
            self._start_waiting(draft)
        plan = StepPlan(self._stats.num_steps, self._freed_rows, draft.new_rows, draft.moves, draft.rows)
        self._freed_rows = []
        self._stats.num_steps += 1
        return plan

    def _continue_running(self, draft: Draft) -> None:
        index = 0
        while index < len(self.running) and draft.budget > 0:
            request = self.running[index]
            grant = self.blocks.grow(request.request_id, request.num_computed_tokens, request.num_tokens)
            if grant is None:
                self._preempt(self._policy.victim(self.running), draft)
                continue  # the same request again, unless it was itself the one to go
            draft.moves += grant.moves
            draft.rows.append(self._row(request, draft, grant.new_block_ids, grant.replaced))
            index += 1

    def _preempt(self, request: Request, draft: Draft) -> None:
        """Takes all of a request's blocks; it comes back first among the waiting and computes its tokens again."""
        self.running.remove(request)
        self.blocks.free(request.request_id)
        request.preempt()
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        self._freed_rows.append(request.request_id)
        self._stats.num_preemptions += 1
        draft.preempted = True

    def _start_waiting(self, draft: Draft) -> None:
        admitted = []
        for request in self._policy.admission_order(self.waiting):
            if draft.budget == 0 or len(self.running) == self._max_num_seqs:
                break
            parent = self._parent_of(request)
            if parent is not None and not self._can_fork(parent):
                continue
            if not (self._start(request) if parent is None else self._fork(request, parent, draft)):
                break
            self._admit(request, draft)
            admitted.append(request.request_id)
        for request_id in admitted:
            del self.waiting[request_id]

    def _parent_of(self, request: Request) -> Request | None:
        """Whose blocks the request is to share; None where it has none, or that one ended or lost its blocks."""
        if request.fork_of is None:
            return None
        parent = self._requests.get(request.fork_of)
        return None if parent is None or (parent.status is RequestStatus.WAITING and parent.num_preemptions) else parent

    def _can_fork(self, parent: Request) -> bool:
        return parent.status is RequestStatus.RUNNING and parent.num_computed_tokens >= parent.num_prompt_tokens - 1

    def _start(self, request: Request) -> bool:
        """Blocks for all its tokens, with one to spare for each running request, so that admission does not cause preemption."""
        num_cached_tokens = self.blocks.start(
            request.request_id,
            request.token_ids,
            salt=request.source.cache_salt,
            read_cache=request.params.prompt_logprobs is None,
            reserve=len(self.running),
        )
        if num_cached_tokens is None:
            return False
        request.num_computed_tokens = num_cached_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens
        return True

    def _fork(self, request: Request, parent: Request, draft: Draft) -> bool:
        """Shares the parent's prompt, of which the last token is computed again: its logits are wanted, and its block copied."""
        num_computed = request.num_prompt_tokens - 1
        self.blocks.fork(parent.request_id, request.request_id, num_computed)
        grant = self.blocks.grow(request.request_id, num_computed, request.num_tokens)
        if grant is None:
            self.blocks.free(request.request_id)
            return False
        draft.moves += grant.moves
        request.num_computed_tokens = request.num_cached_tokens = num_computed
        return True

    def _admit(self, request: Request, draft: Draft) -> None:
        """To the running, with a new row on the worker."""
        request.fork_of = None
        request.status = RequestStatus.RUNNING
        if request.scheduled_ts is None:
            request.scheduled_ts = draft.now
        self.running.append(request)
        source = request.source
        draft.new_rows.append(
            NewRow(
                request.request_id,
                list(request.token_ids),
                request.num_prompt_tokens,
                request.params,
                source.seed,
                source.sample_index,
                sorted(request.end_token_ids),
            )
        )
        draft.rows.append(self._row(request, draft, self.blocks.block_ids(request.request_id), []))

    def _row(self, request: Request, draft: Draft, new_block_ids: list[list[int]], replaced: list[tuple[int, int, int]]) -> ScheduledRow:
        """As many of its tokens as the budget has."""
        start = request.num_computed_tokens
        num_left = request.num_tokens - start
        num_tokens = min(num_left, draft.budget)
        draft.budget -= num_tokens
        num_prompt_logprobs = request.params.prompt_logprobs if request.wants_prompt_logprobs else None
        return ScheduledRow(request.request_id, start, num_tokens, new_block_ids, replaced, num_tokens == num_left, num_prompt_logprobs)

    def free_rows_again(self, plan: StepPlan) -> None:
        """For a plan of which nobody knows how far it was carried out; to free a row twice does no harm."""
        self._freed_rows += plan.freed_rows

    # -- a step is taken in ---------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Advances the plan's requests, finishes and frees; returns what each of them got."""
        outputs, self._outputs = self._outputs, []
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
            request.prompt_logprobs += result.prompt_logprobs
        request.num_computed_tokens = row.start + row.num_tokens
        self.blocks.record(request.request_id, request.token_ids, request.num_computed_tokens, salt=request.source.cache_salt)
        if not row.samples:
            return None
        return self._take_tokens(request, result)

    def _take_tokens(self, request: Request, result: RowResult) -> EngineOutput:
        is_first = request.num_output_tokens == 0
        finish = None
        num_taken = 0
        for token_id in result.token_ids:
            num_taken += 1
            finish = request.append(token_id)
            if finish is not None:
                break
        self._stats.generation_tokens += num_taken
        output = EngineOutput(request.request_id) if finish is None else self._finish(request, finish)
        output.token_ids = result.token_ids[:num_taken]
        output.logprobs = result.logprobs
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
        """Frees all that a request holds; the caller takes it out of its queue."""
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
        )

    def stats(self) -> EngineStats:
        """A snapshot."""
        stats = self._stats
        stats.num_running = len(self.running)
        stats.num_waiting = len(self.waiting)
        stats.num_used_blocks = self.blocks.num_blocks - self.blocks.num_free_blocks
        stats.prefix_query_tokens = self.blocks.num_query_tokens
        stats.prefix_hit_tokens = self.blocks.num_hit_tokens
        return msgspec.structs.replace(stats)
