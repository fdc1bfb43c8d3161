"""Starts swapped and waiting requests in a step, as far as policy, batching, blocks and the step's
budget allow.

Knows nothing of running requests beyond how many there are; who computes which tokens is the
scheduler's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.engine.adapters import AdapterPlaces
from octavo.engine.protocol.prompt_limits import OK, AdmissionDecision
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.scheduler.admission import (
    COMPILING,
    HELD_BACK,
    LOADING,
    NO_BLOCKS,
    NO_PROMPT,
    READING,
    STEP_FULL,
)
from octavo.engine.scheduler.batching import Batching, BatchingState, PromptStep
from octavo.engine.scheduler.grammar_gate import GrammarGate
from octavo.engine.scheduler.kv_allocator import KVAllocator
from octavo.engine.scheduler.request_queues import RequestQueues
from octavo.engine.scheduler.step_builder import StepBuilder


@dataclass(slots=True)
class AdmissionControl:
    """Decides which requests start to run in each step of one engine."""

    queues: RequestQueues
    batching: Batching
    kv_allocator: KVAllocator
    grammars: GrammarGate
    adapters: AdapterPlaces
    max_num_seqs: int
    prompt_since: float | None = None
    """Time at which the last step was planned, if it computes prompt tokens."""
    last_prompt: PromptStep = field(default_factory=PromptStep)

    def begin_step(self, now: float) -> None:
        if self.prompt_since is not None:
            self.last_prompt = PromptStep(now, now - self.prompt_since)
        self.adapters.begin_step()

    def end_step(self, step: StepBuilder) -> None:
        self.prompt_since = step.now if step.has_prompt else None

    def opens_at(self, now: float) -> float:
        """Returns when waiting requests may start if nothing else happens."""
        return self.batching.opens_at(self._batching_state(now))

    def resume_swapped(self, step: StepBuilder) -> Iterator[Request]:
        """Yields the swapped requests that return; the caller runs each before the next."""
        queues = self.queues
        if not queues.swapped:
            return
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
        """Yields the waiting requests that start, in the policy's order; none while a request is
        swapped out. The caller runs each before the next.
        """
        queues = self.queues
        if queues.swapped:
            step.waits_for = NO_BLOCKS.reason
        if queues.swapped or not len(queues.waiting):
            return
        step.waits_for = HELD_BACK
        room = self.batching.room(self._batching_state(step.now))
        started: list[Request] = []
        for request in queues.waiting.order():
            if step.is_out_of_time:
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
            # The next in order may go before one that waits for nothing scarce.
            if decision not in (NO_PROMPT, READING, COMPILING, LOADING):
                break
        for request in started:
            queues.leave_waiting(request)

    def _try_start(self, request: Request, step: StepBuilder, room: int) -> AdmissionDecision:
        """Gives a waiting request its blocks if it may start. A preempted one, or one whose parent
        sample runs, belongs to the batch already: it needs no more than a free row.
        """
        source, queues = request.source, self.queues
        if not self.adapters.is_ready(source.request_id, source.adapter):
            return LOADING
        if not self.grammars.is_ready(source.grammar):
            return COMPILING
        num_running = queues.num_running_seqs
        parent = None if request.fork_of is None else queues.find(request.fork_of)
        if request.has_run:
            room = self.max_num_seqs - num_running
        elif parent is not None and parent.status is RequestStatus.RUNNING:
            room = self.batching.max_num_seqs - num_running
        decision = self.kv_allocator.start(
            request, parent, step, room=room, num_running=num_running
        )
        if decision is OK:
            queues.waiting.started(request)
            self.adapters.hold(source.request_id, source.adapter)
        return decision

    def _has_time_for(self, request: Request, step: StepBuilder) -> bool:
        """Returns whether a swapped request's blocks can return within the step's target."""
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
            num_waiting=len(self.queues.waiting),
            arrival_time=now if oldest is None else oldest.source.arrival_time,
            last_prompt=self.last_prompt,
        )
