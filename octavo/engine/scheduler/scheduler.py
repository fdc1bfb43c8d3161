"""Schedules each step and updates requests by its result.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi, Agrawal et al. 2023):
there is no prefill phase and no decode phase. Each request has `num_computed_tokens`, which catches
up with `num_tokens` under one token budget. Times and step costs are arguments, so that a recording
replays exactly.
"""

from __future__ import annotations

import msgspec

from octavo.engine.adapters import NO_SLOT
from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.kv.block_tables import BlockAllocation
from octavo.engine.protocol.kv_cache_spec import UNBOUNDED
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.prompt_limits import AllocStatus, PromptLimits
from octavo.engine.protocol.requests import EngineRequest, RequestChange
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step import (
    ResultKind,
    RowResult,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from octavo.engine.protocol.step_costs import UNMEASURED, StepCosts
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.requests.sequence_state import Finish, RequestProgress, SequenceState
from octavo.engine.requests.stop_strings import MakeStopTexts
from octavo.engine.requests.timings import Timekeeper
from octavo.engine.scheduler.admission_control import AdmissionControl
from octavo.engine.scheduler.batching import Batching
from octavo.engine.scheduler.in_flight_steps import InFlightSteps
from octavo.engine.scheduler.kv_allocator import KVAllocator
from octavo.engine.scheduler.micro_batch import MicroBatch
from octavo.engine.scheduler.preemption import Mode, Preemption
from octavo.engine.scheduler.request_queues import RequestQueues, WaitingQueue
from octavo.engine.scheduler.request_resources import RequestResources
from octavo.engine.scheduler.step_builder import MultiStepPolicy, StepBuilder, StepLimits
from octavo.engine.scheduler.step_time import step_time
from octavo.engine.speculation.speculation import Speculation, SpeculationOptions


class Scheduler:
    """Decides what each step computes, and updates the requests by its result.

    A request that can never fit (prompt and one token exceed the context or the KV cache) fails
    when it is added; others end with "length" when they reach these limits. Therefore the last
    running request always finds blocks after the others are preempted.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        limits: StepLimits,
        prompt_limits: PromptLimits,
        waiting: WaitingQueue,
        batching: Batching | None,
        kv_allocator: KVAllocator,
        preemption_mode: Mode,
        multi_step_policy: MultiStepPolicy,
        drafting: SpeculationOptions | None = None,
        stop_texts: MakeStopTexts | None = None,
        num_adapter_slots: int = 0,
        media_cache_tokens: int = 0,
    ) -> None:
        """`batching`: None for continuous batching. `stop_texts`: for beam searches with stop
        strings; the frontend finds the stop strings of other requests.
        """
        self.blocks = blocks
        self.kv_allocator = kv_allocator
        self.queues = RequestQueues(waiting)
        self.in_flight = InFlightSteps(samples_ahead=limits.num_micro_batches == 1)
        self.resources = RequestResources(num_adapter_slots, media_cache_tokens)
        self.leaving: list[Request] = []
        """Finished requests whose last step is still in flight; freed when its result arrives."""
        self._limits = limits
        self.admission = AdmissionControl(
            self.queues, prompt_limits, batching, kv_allocator, self.resources, limits.max_num_seqs
        )
        self._multi_step_policy = multi_step_policy
        self._stop_texts = stop_texts
        self.ended_outputs: list[EngineOutput] = []
        """Final outputs of requests that were rejected or aborted since the last update."""
        self.times = Timekeeper()
        self._stats = EngineStats()
        self._preemption = Preemption(
            self.queues, blocks, kv_allocator, self.times, self._stats, preemption_mode
        )
        self._speculation: Speculation | None = None
        if drafting is not None:
            self._speculation = Speculation(blocks, self._stats, drafting)

    # -- schedule ----------------------------------------------------------------------------------

    def schedule(self, now: float, costs: StepCosts = UNMEASURED) -> StepPlan:
        """Returns the next step's plan: tokens of running requests first, then of swapped requests
        that resume, then of waiting requests that start.
        """
        self.times.begin_step(now)
        queues = self.queues
        step = self._begin_plan(now, costs)
        micro_batch = None
        if self._limits.num_micro_batches > 1:
            micro_batch = MicroBatch.of(queues.running, self._limits.num_micro_batches)
        for request in queues.waiting.ranked(queues.running):
            if step.budget == 0:
                break
            # The request may have been preempted for an earlier one.
            if request.status is not RequestStatus.RUNNING:
                continue
            if micro_batch is None:
                self._schedule_request(request, step)
            elif micro_batch.has_room_for(request):
                num_rows = len(step.rows)
                self._schedule_request(request, step)
                if len(step.rows) > num_rows:
                    micro_batch.add(request)
        # Blocks freed by a preemption are for the running requests.
        if not (step.preempted or step.is_short):
            if queues.swapped:
                for request in self.admission.resume_swapped(step):
                    self._run(request, step)
            if queues.waiting.num_requests:
                for request in self.admission.admit_waiting(step):
                    self._run(request, step)
        return self._build_plan(step)

    def _begin_plan(self, now: float, costs: StepCosts) -> StepBuilder:
        queues, limits = self.queues, self._limits
        if self.admission.batching is not None:
            self.admission.begin_step(now)
        max_chunk = limits.max_num_batched_tokens
        if limits.max_chunk is not None:
            max_chunk = queues.waiting.max_chunk(limits.max_chunk, queues.running)
        step = StepBuilder(now, costs, limits.max_num_batched_tokens, max_chunk)
        if self.in_flight.steps:
            step.runs_ahead, step.samples_ahead = True, limits.num_micro_batches == 1
        if limits.itl_target_s is not None:
            step.time = step_time(costs, limits.itl_target_s, queues.running)
        if self.blocks.connector is not None:
            step.moves += self.blocks.begin_step()
        return step

    def _run(self, request: Request, step: StepBuilder) -> None:
        """Runs a request whose blocks are allocated, and schedules its tokens."""
        request.fork_of = None
        if request.scheduled_ts is None:
            request.scheduled_ts = step.now
        self.times.runs(request.watch)
        self.queues.run(request)
        self._schedule_request(request, step)

    def _schedule_request(self, request: Request, step: StepBuilder) -> None:
        """Adds tokens of the request's rows. A beam without tokens to compute waits for the other
        beams.
        """
        blocks, source = self.blocks, request.source
        for row in request.rows:
            start = row.num_computed_tokens + row.num_tokens_in_flight
            end = step.get_end(request, row, start)
            if end == start:
                continue
            if blocks.hashes.has_checkpoints:
                end = blocks.hashes.step_end(row.request_id, start, end)
            while (added := blocks.grow(row.request_id, start, end)) is None:
                if not self._preemption.make_room(request, step):
                    return
            if not row.is_on_worker:
                slot = (
                    self.resources.get_adapter_slot(source) if self.resources.is_used else NO_SLOT
                )
                step.add_new_row(request, row, slot)
                tables = list(map(list, blocks.tables[row.request_id]))
                added = BlockAllocation(tables, moves=added.moves)
            step.add_row(request, row, start, end, added)
            if source.media:
                self.resources.read_media(source, start, end)

    def _build_plan(self, step: StepBuilder) -> StepPlan:
        """Completes a plan: adds draft tokens, or several decode steps if no request waits."""
        queues, allocator, speculation = self.queues, self.kv_allocator, self._speculation
        plan = StepPlan(
            self._stats.num_steps, allocator.freed_rows, step.new_rows, step.moves, step.rows
        )
        allocator.freed_rows = []
        if self.blocks.connector is not None:
            allocator.stream(step)
            plan.connector = self.blocks.connector.end_step()
        has_drafts = (
            speculation is not None and speculation.is_active and speculation.add_drafts(step)
        )
        is_busy = (
            queues.swapped or queues.waiting.num_requests or step.runs_ahead or self.ended_outputs
        )
        if not (has_drafts or is_busy):
            plan.num_steps = self._multi_step_policy.num_steps(
                step, num_running=len(queues.running)
            )
        plan.table_lengths, allocator.table_lengths = allocator.table_lengths, []
        if self.resources.is_used:
            self.resources.add_to_plan(plan)
        self.in_flight.add(step)
        if self.admission.batching is not None:
            self.admission.end_step(step)
        self._stats.num_steps += 1
        self.times.planned(len(step.rows), step.waits_for if queues.waiting.num_requests else "")
        return plan

    # -- update ------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Updates the requests of the oldest step in flight; returns their outputs, after the final
        outputs of requests that ended between steps.
        """
        outputs, self.ended_outputs = self.ended_outputs, []
        step = self.in_flight.pop(plan.num_steps)
        step.count(result, self._stats, self.times)
        if step.is_first:
            outputs += self._take_reports(result)
        for (request, row), scheduled, row_result in zip(
            step.owners, plan.rows, result.rows, strict=True
        ):
            if step.is_first:
                row.num_tokens_in_flight -= scheduled.num_tokens
            # Another of its rows may have failed, or an earlier step ended it.
            if request.status is not RequestStatus.FINISHED:
                output = self._update_row(request, row, scheduled, row_result)
                if output is not None:
                    outputs.append(output)
        goes_on = True
        for request, _ in step.owners:
            goes_on &= request.status is RequestStatus.RUNNING
        if not goes_on:
            self.queues.drop_finished()
        if self.in_flight.decoding is not None:
            speculation = self._speculation
            if not goes_on or (
                # Verifying drafts after the last tokens may be faster than another plain step.
                speculation is not None
                and speculation.is_active
                and speculation.should_end_decode(step.owners)
            ):
                self.end_decode()
            else:
                for scheduled in plan.rows:
                    scheduled.start += 1
        if self.leaving:
            self._free_leaving()
        return outputs

    def pop_outputs(self) -> list[EngineOutput]:
        """Returns the final outputs of requests that ended since the last step."""
        outputs, self.ended_outputs = self.ended_outputs, []
        return outputs

    def _update_row(
        self, request: Request, row: SequenceState, scheduled: ScheduledRequest, result: RowResult
    ) -> EngineOutput | None:
        """Updates a row by its result. Returns None if its request has no output yet."""
        if result.failure is not None:
            return self._finish(request, Finish("error", error=result.failure))
        if result.prompt_logprobs:
            request.add_prompt_logprobs(scheduled.start + 1, result.prompt_logprobs)
        progress = (
            request.consumer.process_result(request, row, result)
            if scheduled.result_kind != ResultKind.NONE
            else None
        )
        if self._speculation is not None and (self._speculation.is_active or result.draft_ids):
            num_taken = len(result.token_ids) if progress is None else progress.num_tokens
            request.num_draft_tokens += len(scheduled.draft_ids)
            request.num_accepted_tokens += self._speculation.record(scheduled, result, num_taken)
        if scheduled.leaf_blocks:
            self.blocks.keep_path(row.request_id, result.kept_path)
        num_kept = result.num_kept
        if num_kept < scheduled.num_tokens and not self.blocks.keeps_parts:
            num_kept = 0
        row.num_computed_tokens = min(scheduled.start + num_kept, len(row.token_ids))
        if scheduled.result_kind != ResultKind.NONE and not self._limits.keeps_kv:
            row.num_computed_tokens = 0
        # Blocks of a continuing request are settled at the end of its plan: no lookup is earlier.
        if self.in_flight.decoding is None or (progress is not None and progress.finish):
            self._settle(row)
        return None if progress is None else self._output(request, progress)

    def _output(self, request: Request, progress: RequestProgress) -> EngineOutput | None:
        """Counts a request's new tokens, branches its rows or ends it. Returns None if there is no
        output.
        """
        if request.watch.first_token is None:
            self.times.record_first_token(request.watch)
            if not request.source.output_token_ids:
                self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.generation_tokens += progress.num_tokens
        if self.queues.fair is not None:
            self.queues.fair.count(request, progress.num_tokens)
        if progress.replaced_rows:
            self.kv_allocator.branch(progress.replaced_rows, progress.branches)
        if progress.finish is not None:
            output = self._finish(request, progress.finish)
            output.token_ids, output.logprobs = progress.token_ids, progress.logprobs
            output.beams, output.pooled = progress.beams, progress.pooled
        else:
            if request.num_exact_tokens < UNBOUNDED and request.has_outgrown:
                # Its tokens get other positions: all of them are recomputed, and none is in flight.
                self.times.preempted(request.watch)
                self._preemption.restart(request)
            if not progress.token_ids:
                return None
            output = EngineOutput(request.request_id, progress.token_ids, progress.logprobs)
            if request.ends_by_text:  # the frontend may end the request and then needs the timings
                output.timings = request.timings(self.times.get_timings(request.watch))
        output.mirostat_mu = request.mirostat_mu
        if progress.is_first:
            request.describe_start(output)
        return output

    def _settle(self, row: SequenceState) -> None:
        """Caches the blocks that a row's computed tokens fill, and frees the blocks beyond its
        end.
        """
        if self._limits.keeps_kv:
            self.blocks.record(
                row.request_id,
                row.token_ids,
                row.num_computed_tokens,
                in_flight=row.num_tokens_in_flight > 0,
            )
        self.kv_allocator.free_unused(row)

    def _take_reports(self, result: StepResult) -> list[EngineOutput]:
        """Processes the reports of a plan's first result; returns the outputs of waiting requests
        whose adapters failed to load.
        """
        if self.blocks.connector is not None:
            self.blocks.connector.step_done(result.connector)
        faults = self.resources.update(result) if self.resources.is_used else {}
        if not faults:
            return []
        return [
            self._finish(request, Finish("error", error=faults[adapter.digest]))
            for request in self.waiting
            if (adapter := request.source.adapter) is not None and adapter.digest in faults
        ]

    def end_decode(self) -> None:
        """Ends a multi-step plan after the last step that was computed."""
        for request, row in self.in_flight.end_decode():
            if request.status is RequestStatus.RUNNING:
                self._settle(row)

    def plan_failed(self, plan: StepPlan) -> None:
        """Handles the failure of a plan after partial execution: frees its rows again, which is
        harmless, and restarts the requests that it swapped out. Later decode steps of a plan move
        and free nothing.
        """
        if self.in_flight.decoding is not None:
            return
        self.kv_allocator.freed_rows += self.in_flight.not_readded(plan.freed_rows)
        if self.blocks.connector is not None:
            self.blocks.connector.step_failed()
        self.resources.plan_failed(plan)
        for request in self.in_flight.steps[0].swapped_out:
            if request.status is RequestStatus.SWAPPED:
                self._preemption.restart(request)

    # -- adding, changing and ending requests ------------------------------------------------------

    def add(self, source: EngineRequest) -> None:
        """Adds a waiting request. If it can never fit, the next update returns its final output, an
        error.
        """
        width = source.params.beam_width
        limits = self.admission.limits
        if width is not None:
            limits = self.admission.get_limits(self.blocks.capacity_of(width))
        num_prompt_tokens = len(source.prompt_token_ids)
        max_num_tokens = limits.max_num_tokens(num_prompt_tokens, width or 1)
        request = Request(
            source,
            max_num_tokens=max_num_tokens,
            make_stop_texts=self._stop_texts,
            original=self.blocks.original,
        )
        self._stats.num_added += 1
        self._stats.num_added_tokens += num_prompt_tokens
        self.times.arrived(request.watch)
        decision = limits.judge(
            num_prompt_tokens, width, num_needed=source.params.num_needed_tokens
        )
        finish = None
        if decision.status is AllocStatus.NEVER:
            finish = Finish("error", error=decision.reason)
        elif source.output_token_ids and request.num_tokens >= request.max_num_tokens:
            # Its limit was lowered, and the core was lost before it could end the request.
            finish = Finish("length")
        if finish is not None:
            self.ended_outputs.append(self._final_output(request, finish))
            return
        self.queues.add(request)
        if source.grammar is not None or source.adapter is not None or source.media:
            self.resources.request(source)
        if request.fork_of is None and self.blocks.connector is not None:
            self.kv_allocator.prefetch(request, self.queues.num_running_seqs, at_once=True)

    def change(self, change: RequestChange) -> None:
        """Changes the params and priority of an unfinished request. Ignores unknown ones, which may
        have just finished.
        """
        request = self.queues.by_id.get(change.request_id)
        if request is None:
            return
        self.queues.set_priority(request, change.priority)
        if change.computes_here:
            self.kv_allocator.reset_kv_source(request)
        max_num_tokens = self.admission.limits.max_num_tokens(request.num_prompt_tokens)
        request.change(change.params, max_num_tokens=max_num_tokens)
        if request.num_tokens >= request.max_num_tokens:
            self.end(request.request_id, Finish("length"))

    def end(self, request_id: str, finish: Finish) -> None:
        """Ends a request and frees its blocks. Ignores unknown ones, which may have just
        finished.
        """
        request = self.queues.by_id.get(request_id)
        if request is not None:
            self.ended_outputs.append(self._finish(request, finish))
            self.queues.drop_finished()

    def _finish(self, request: Request, finish: Finish) -> EngineOutput:
        """Ends a request, frees everything that it holds and returns its final output."""
        self.queues.end(request)
        if self._speculation is not None and self._speculation.is_active:
            self._speculation.remove_request(request)
        if request.source.sends_kv:
            self.kv_allocator.sent(request)
        if finish.reason == "error":
            self.kv_allocator.remove_from_cache(request)
        # A step in flight still writes to its blocks and reads its row.
        if self.in_flight.computes(request):
            self.leaving.append(request)
        else:
            self._free(request)
        return self._final_output(request, finish)

    def _final_output(self, request: Request, finish: Finish) -> EngineOutput:
        return request.final_output(finish, self.times.get_timings(request.watch))

    def _free(self, request: Request) -> None:
        self.kv_allocator.free(request)
        if self.resources.is_used:
            self.resources.release(request.source)

    def _free_leaving(self) -> None:
        leaving, self.leaving = self.leaving, []
        for request in leaving:
            if self.in_flight.computes(request):
                self.leaving.append(request)
            else:
                self._free(request)

    # -- state -------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests, in the order in which they start."""
        return list(self.queues.waiting.order())

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule or to return."""
        return bool(self.queues.by_id or self.ended_outputs or self.blocks.has_transfers)

    @property
    def waits_for(self) -> str:
        """Reason why the first waiting request did not start in the last plan; "" if none waits."""
        return self.times.waits_for

    @property
    def waits_for_results(self) -> str:
        """Reason why no step can be scheduled before one in flight returns; "" if one can."""
        return self.in_flight.reason_to_wait(self.queues.running)

    def pause_s(self, now: float) -> float:
        """Returns the seconds for which a batch waits to fill unless a request is added or ends."""
        queues = self.queues
        is_busy = queues.running or queues.swapped or self.ended_outputs or not queues.by_id
        if is_busy or self.blocks.has_transfers or self.admission.batching is None:
            return 0.0
        return max(0.0, self.admission.opens_at(now) - now)

    def stats(self) -> EngineStats:
        """Returns a snapshot of the counters."""
        self.queues.set_gauges(self._stats)
        self.blocks.set_gauges(self._stats)
        return msgspec.structs.replace(self._stats)
