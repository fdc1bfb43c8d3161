"""Admission control: starts swapped and waiting requests in a step, as far as the queue order,
batching, KV blocks and the step's budget allow.

A decision is OK, LATER (with the resource that the request waits for), or NEVER (with the exceeded
limit).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from octavo.engine.protocol.prompt_limits import OK, AdmissionDecision, AllocStatus, PromptLimits
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.scheduler.batching import Batching, BatchingState, PromptStep
from octavo.engine.scheduler.kv_allocator import KVAllocator
from octavo.engine.scheduler.request_queues import RequestQueues
from octavo.engine.scheduler.request_resources import RequestResources
from octavo.engine.scheduler.step_builder import StepBuilder

BATCH_FULL = AdmissionDecision(AllocStatus.LATER, "batch full")
STEP_FULL = AdmissionDecision(AllocStatus.LATER, "step full")
NO_BLOCKS = AdmissionDecision(AllocStatus.LATER, "KV full")
READING = AdmissionDecision(AllocStatus.LATER, "reading the prefix cache")
COMPILING = AdmissionDecision(AllocStatus.LATER, "compiling its grammar")
LOADING = AdmissionDecision(AllocStatus.LATER, "loading its adapter")
NO_PROMPT = AdmissionDecision(AllocStatus.LATER, "waiting for a shared prompt to be computed")

HELD_BACK = "held back by the scheduling policy"
"""Reason of requests whose tenant has reached its limit of running requests."""


@dataclass(slots=True)
class AdmissionControl:
    """Decides which requests start in each step."""

    queues: RequestQueues
    limits: PromptLimits
    batching: Batching | None
    """Rule for starting waiting requests; None: whenever there is room (continuous batching)."""
    kv_allocator: KVAllocator
    resources: RequestResources
    max_num_seqs: int
    prompt_since: float | None = None
    """Time at which the last step was scheduled if it computes prompt tokens; else None."""
    last_prompt: PromptStep = field(default_factory=PromptStep)

    def get_limits(self, kv_capacity_tokens: int) -> PromptLimits:
        """Returns the limits of requests whose rows may have up to `kv_capacity_tokens` tokens."""
        return replace(self.limits, kv_capacity_tokens=kv_capacity_tokens)

    def begin_step(self, now: float) -> None:
        if self.prompt_since is not None:
            self.last_prompt = PromptStep(now, now - self.prompt_since)

    def end_step(self, step: StepBuilder) -> None:
        self.prompt_since = step.now if step.has_prompt else None

    def opens_at(self, now: float) -> float:
        """Returns when waiting requests may start if nothing else happens."""
        assert self.batching is not None, "with continuous batching they may start now"
        return self.batching.opens_at(self._batching_state(now))

    def resume_swapped(self, step: StepBuilder) -> Iterator[Request]:
        """Yields the swapped requests to resume; the caller runs each one before it requests the
        next.
        """
        queues = self.queues
        for request in list(queues.waiting.ranked(queues.swapped)):
            num_seqs = queues.num_running_seqs + request.num_seqs
            if step.budget == 0 or num_seqs > self.max_num_seqs:
                return
            if step.time is not None and not self._has_time_for(request, step):
                return
            if not self.kv_allocator.swap_in(request, step, num_running=queues.num_running_seqs):
                return
            yield request

    def admit_waiting(self, step: StepBuilder) -> Iterator[Request]:
        """Yields the waiting requests to start, in queue order; none while a request is swapped
        out. The caller runs each one before it requests the next.
        """
        queues = self.queues
        if queues.swapped:
            step.waits_for = NO_BLOCKS.reason
            return
        step.waits_for = HELD_BACK
        room = self.max_num_seqs - queues.num_batch_seqs
        if self.batching is not None:
            room = self.batching.room(self._batching_state(step.now))
        started: list[Request] = []
        for request in queues.waiting.order():
            if step.time is not None and step.time.is_full(len(step.moves)):
                step.waits_for = STEP_FULL.reason
                break
            # If nothing runs, a request starts even if its rows exceed the batch's room.
            is_alone = not (started or queues.running)
            rows_left = min(room, 1) * self.max_num_seqs if is_alone else room
            decision = self._try_start(request, step, rows_left)
            if decision is OK:
                started.append(request)
                room -= request.num_seqs
                yield request
                continue
            step.waits_for = decision.reason
            # The next request may overtake one that waits for nothing scarce.
            if decision not in (NO_PROMPT, READING, COMPILING, LOADING):
                break
        for request in started:
            queues.leave_waiting(request)

    def _try_start(self, request: Request, step: StepBuilder, room: int) -> AdmissionDecision:
        """Allocates a waiting request's blocks if it may start. `room` is the number of rows that
        may be added.
        """
        queues, allocator = self.queues, self.kv_allocator
        num_running = queues.num_running_seqs
        parent = None if request.fork_of is None else queues.by_id.get(request.fork_of)
        # A preempted request, or one whose parent runs, already belongs to the batch.
        if request.has_run:
            room = self.max_num_seqs - num_running
        elif parent is not None and parent.status is RequestStatus.RUNNING:
            max_num_seqs = (
                self.max_num_seqs if self.batching is None else self.batching.max_num_seqs
            )
            room = max_num_seqs - num_running
        if parent is not None and not allocator.is_shareable(request, parent):
            parent = None
        decision = self._check_ready(request, parent, step)
        if decision is not OK:
            return decision
        if room < request.num_seqs:
            return BATCH_FULL
        num_whole = 0 if parent is not None else request.num_input_tokens
        num_tokens, whole = len(request.token_ids), self.limits.max_whole_prompt
        # A prompt that is not chunked needs room for all of its tokens.
        min_tokens = num_tokens if whole is not None and num_tokens <= whole else 1
        if step.budget < num_whole + min_tokens:
            return STEP_FULL
        if not allocator.start(request, parent, step, num_running=num_running):
            return NO_BLOCKS
        if queues.fair is not None:
            queues.fair.started(request)
        if self.resources.is_used:
            self.resources.hold(request.source)
        return OK

    def _check_ready(
        self, request: Request, parent: Request | None, step: StepBuilder
    ) -> AdmissionDecision:
        """Returns whether a request is ready to start, apart from blocks and the step's budget."""
        if self.resources.is_used:
            if not self.resources.is_loaded(request.source):
                return LOADING
            if not self.resources.is_compiled(request.source):
                return COMPILING
        if parent is not None:
            is_computed = self.kv_allocator.has_shared_tokens(request, parent)
            return OK if is_computed else NO_PROMPT
        if self.kv_allocator.has_connector:
            num_running = self.queues.num_running_seqs
            return READING if self.kv_allocator.is_reading(request, step, num_running) else OK
        return OK

    def _has_time_for(self, request: Request, step: StepBuilder) -> bool:
        """Returns whether swapping a request in fits into the step's time target."""
        assert step.time is not None
        num_blocks = self.kv_allocator.num_swapped_blocks(request)
        allowed = step.time.allows_moves(num_blocks, len(step.moves))
        step.time.has_chunk |= allowed
        return allowed

    def _batching_state(self, now: float) -> BatchingState:
        oldest = self.queues.waiting.oldest()
        return BatchingState(
            now,
            num_running=self.queues.num_batch_seqs,
            num_waiting=self.queues.waiting.num_requests,
            arrival_time=now if oldest is None else oldest.source.arrival_time,
            last_prompt=self.last_prompt,
        )
