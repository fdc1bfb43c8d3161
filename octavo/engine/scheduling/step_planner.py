"""Plans one step: one token budget over running, then swapped, then waiting requests.

There is no prefill phase and no decode phase: every request has `num_computed_tokens` that catches
up with `num_tokens`. Moves requests between the queues and asks the collaborators who goes first,
who may start and how; knows neither results nor outputs. Source: continuous batching (Orca, Yu et
al. 2022), chunked prefill (Sarathi, Agrawal et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.adapters import AdapterPlaces
from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.kv.block_tables import Grant
from octavo.engine.media import MediaPlaces
from octavo.engine.protocol.prompt_limits import OK, AdmissionDecision
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.requests.timings import Timekeeper
from octavo.engine.requests.token_row import TokenRow
from octavo.engine.scheduling.admission import (
    COMPILING,
    HELD_BACK,
    LOADING,
    NO_BLOCKS,
    NO_PROMPT,
    READING,
    STEP_FULL,
)
from octavo.engine.scheduling.batching import Batching, BatchingState, PromptStep
from octavo.engine.scheduling.grammar_gate import GrammarGate
from octavo.engine.scheduling.lane import Lane
from octavo.engine.scheduling.multi_step import MultiStepPolicy
from octavo.engine.scheduling.placement import Placement
from octavo.engine.scheduling.policy import Policy
from octavo.engine.scheduling.request_queues import RequestQueues
from octavo.engine.scheduling.step_builder import StepBuilder
from octavo.engine.scheduling.step_time import step_time
from octavo.engine.scheduling.steps_in_flight import StepsInFlight
from octavo.engine.speculation.speculation import Speculating
from octavo.engine.step_costs import StepCosts
from octavo.step import StepPlan


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Upper bounds on what one step holds."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_chunk: int | None
    """Most tokens of one request; None where prompts are not chunked."""
    itl_target_s: float | None = None
    """Longest time between two tokens that a step is to leave to the rows that generate."""
    keeps_kv: bool = True
    """False: every step computes all of a request's tokens again, for comparison."""
    num_lanes: int = 1
    """Steps in flight at once over which the requests that generate are shared out. A request's
    next token is planned once the last one has come back.
    """

    def chunk(self, policy: Policy) -> int:
        """Returns the most tokens of one request in the coming step."""
        if self.max_chunk is None:
            return self.max_num_batched_tokens
        return policy.max_chunk(self.max_chunk)


@dataclass(slots=True)
class StepPlanner:
    """Composes the steps of one engine, in their order."""

    limits: StepLimits
    queues: RequestQueues
    blocks: BlockManager
    batching: Batching
    placement: Placement
    multi_step_policy: MultiStepPolicy
    speculation: Speculating
    in_flight: StepsInFlight
    grammars: GrammarGate
    adapters: AdapterPlaces
    media: MediaPlaces
    times: Timekeeper
    stats: EngineStats
    prompt_since: float | None = None
    """When the last step was planned, where it computes a prompt's tokens."""
    last_prompt: PromptStep = field(default_factory=PromptStep)

    def plan(self, now: float, costs: StepCosts, *, single_step: bool) -> StepPlan:
        """Returns the next step's plan, of one decode step where `single_step`."""
        self.times.begin_step(now)
        self.adapters.begin_step()
        if self.prompt_since is not None:
            self.last_prompt = PromptStep(now, now - self.prompt_since)
        builder = StepBuilder(
            now,
            costs,
            budget=self.limits.max_num_batched_tokens,
            max_chunk=self.limits.chunk(self.queues.waiting),
            runs_ahead=bool(self.in_flight),
            draws_ahead=bool(self.in_flight) and self.limits.num_lanes == 1,
            time=step_time(costs, self.limits.itl_target_s, self.queues.running),
        )
        builder.moves += self.blocks.begin_step()
        self._continue_running(builder)
        # Blocks that a preemption freed are for those that run on, not for others to start.
        if not (builder.preempted or builder.is_short):
            self._return_swapped(builder)
            self._start_waiting(builder)
        return self._finish(builder, single_step=single_step)

    def batching_state(self, now: float) -> BatchingState:
        """Returns what decides how many requests may start."""
        oldest = self.queues.waiting.oldest()
        return BatchingState(
            now,
            num_running=self.queues.num_batch_seqs,
            num_waiting=len(self.queues.waiting),
            arrival_time=now if oldest is None else oldest.source.arrival_time,
            last_prompt=self.last_prompt,
        )

    # -- running requests go on --------------------------------------------------------------------

    def _continue_running(self, builder: StepBuilder) -> None:
        """Gives each running request as many of its missing tokens as the budget has."""
        lane = Lane.of(self.queues.running, self.limits.num_lanes)
        for request in list(self.queues.waiting.ranked(self.queues.running)):
            if builder.budget == 0:
                break
            # An earlier one may have preempted it.
            if request.status is RequestStatus.RUNNING and lane.has_room_for(request):
                num_rows = len(builder.rows)
                self._compute(request, builder)
                if len(builder.rows) > num_rows:
                    lane.take(request)

    def _compute(self, request: Request, builder: StepBuilder) -> None:
        """Adds tokens of the request's rows to the step. A beam that has none waits for the
        others.
        """
        for row in request.rows:
            start = row.num_planned_tokens
            end = builder.end_of(request, row, start)
            if end == start:
                continue
            end = self.blocks.names.step_end(row.request_id, start, end)
            grant = self._make_room(request, row, start, end, builder)
            if grant is None:
                return
            if not row.is_on_worker:
                builder.add_new_row(request, row, self.adapters.slot_of(request.source.adapter))
                grant = Grant(self.blocks.block_ids(row.request_id), moves=grant.moves)
            builder.add_row(request, row, start, end, grant)
            self.media.use(request.source, start, end)

    def _make_room(
        self, request: Request, row: TokenRow, start: int, end: int, builder: StepBuilder
    ) -> Grant | None:
        """Returns blocks for these tokens, and preempts others where they are missing; None where
        the request itself is preempted, or has to wait for a step in flight.
        """
        while (grant := self.blocks.grow(row.request_id, start, end)) is None:
            if builder.runs_ahead:
                builder.is_short = True
                builder.waits_for = NO_BLOCKS.reason
                return None
            victim = self.queues.waiting.victim(self.queues.running)
            self._preempt(victim, builder)
            if victim is request:
                return None
        return grant

    def _preempt(self, request: Request, builder: StepBuilder) -> None:
        """Takes all of a running request's blocks: it is swapped out, or computed again later."""
        request.num_preemptions += 1
        self.times.preempted(request.watch)
        builder.preempted = True
        builder.waits_for = NO_BLOCKS.reason
        builder.drop_rows(request)
        moves = self.placement.swap_out(request, builder)
        if moves is None:
            self.start_over(request)
        else:
            self.queues.swap_out(request)
            builder.moves += moves
            builder.swapped_out.append(request)
            self.stats.num_swaps += 1
        self.stats.num_preemptions += 1

    def start_over(self, request: Request) -> None:
        """Frees what a request holds and puts it back to the front of the waiting."""
        self.placement.free(request)
        self.queues.start_over(request)

    # -- swapped requests return, waiting ones start -----------------------------------------------

    def _return_swapped(self, builder: StepBuilder) -> None:
        queues = self.queues
        for request in list(queues.waiting.ranked(queues.swapped)):
            num_seqs = queues.num_running_seqs + request.num_seqs
            if builder.budget == 0 or num_seqs > self.limits.max_num_seqs:
                return
            if not self._has_time_for(request, builder):
                return
            if not self.placement.swap_in(request, builder, num_running=queues.num_running_seqs):
                return
            self._run(request, builder)

    def _has_time_for(self, request: Request, builder: StepBuilder) -> bool:
        """Says whether a swapped request's blocks can be brought back within the step's target."""
        if builder.time is None:
            return True
        num_blocks = self.blocks.host.num_blocks_of(row.request_id for row in request.rows)
        allowed = builder.time.allows_moves(num_blocks, len(builder.moves))
        builder.time.has_chunk |= allowed
        return allowed

    def _start_waiting(self, builder: StepBuilder) -> None:
        """Starts waiting requests in the policy's order, as far as admission and blocks go; none
        while a request is swapped out.
        """
        queues = self.queues
        if queues.swapped:
            builder.waits_for = NO_BLOCKS.reason
        if queues.swapped or not len(queues.waiting):
            return
        builder.waits_for = HELD_BACK
        room = self.batching.room(self.batching_state(builder.now))
        started: list[Request] = []
        for request in queues.waiting.order():
            if builder.is_out_of_time:
                builder.waits_for = STEP_FULL.reason
                break
            # Where nothing runs, a request starts whose rows are more than a batch's room.
            is_alone = not (started or queues.running)
            rows_left = min(room, 1) * self.limits.max_num_seqs if is_alone else room
            decision = self._start(request, builder, rows_left)
            if decision is OK:
                started.append(request)
                room -= request.num_seqs
                continue
            builder.waits_for = decision.reason
            # The next in order may go before one that waits for nothing scarce.
            if decision not in (NO_PROMPT, READING, COMPILING, LOADING):
                break
        for request in started:
            queues.leave_waiting(request)

    def _start(self, request: Request, builder: StepBuilder, room: int) -> AdmissionDecision:
        """Runs a waiting request where it may start. One that belongs to the batch already, since
        it has run or by its parent sample, needs no more than a place.
        """
        source = request.source
        if not self.adapters.is_ready(source.request_id, source.adapter):
            return LOADING
        if not self.grammars.is_ready(source.grammar):
            return COMPILING
        num_running = self.queues.num_running_seqs
        parent = None if request.fork_of is None else self.queues.find(request.fork_of)
        if request.has_run:
            room = self.limits.max_num_seqs - num_running
        elif parent is not None and parent.status is RequestStatus.RUNNING:
            room = self.batching.max_num_seqs - num_running
        decision = self.placement.start(
            request, parent, builder, room=room, num_running=num_running
        )
        if decision is OK:
            self.queues.waiting.started(request)
            self.adapters.hold(source.request_id, source.adapter)
            self._run(request, builder)
        return decision

    def _run(self, request: Request, builder: StepBuilder) -> None:
        """Lets a request run that has blocks for as many tokens as the budget has."""
        request.fork_of = None
        if request.scheduled_ts is None:
            request.scheduled_ts = builder.now
        self.times.runs(request.watch)
        self.queues.run(request)
        self._compute(request, builder)

    # -- the plan ----------------------------------------------------------------------------------

    def _finish(self, builder: StepBuilder, *, single_step: bool) -> StepPlan:
        queues = self.queues
        freed_rows = self.placement.take_freed_rows()
        self.placement.stream(builder)
        connector = self.blocks.connector.end_step()
        num_steps = 1
        single_step |= self.speculation.add_drafts(builder)
        if not (single_step or queues.swapped or len(queues.waiting) or self.in_flight):
            num_steps = self.multi_step_policy.num_steps(builder, num_running=len(queues.running))
        plan = StepPlan(
            self.stats.num_steps,
            freed_rows=freed_rows,
            new_rows=builder.new_rows,
            moves=builder.moves,
            rows=builder.rows,
            connector=connector,
            num_steps=num_steps,
            table_ends=self.placement.take_table_ends(),
            compiles=self.grammars.take_wanted(),
            adapters=self.adapters.take_loads(),
            encodes=self.media.take_encodes(),
            dropped_media=self.media.take_dropped(),
        )
        self.in_flight.add(builder)
        self.prompt_since = builder.now if builder.has_prompt else None
        self.stats.num_steps += 1
        self.times.planned(len(builder.rows), builder.waits_for if len(queues.waiting) else "")
        return plan
