"""Plans each step and updates requests by its result.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi, Agrawal et al. 2023):
there is no prefill phase and no decode phase. Every request has `num_computed_tokens` that catches
up with `num_tokens`, under one token budget. Reads no clock and measures nothing (time and costs
are arguments), so that a recording replays exactly; sees neither text nor arrays.
"""

from __future__ import annotations

import msgspec

from octavo.api.sampling_params import SamplingParams
from octavo.engine.adapters import AdapterPlaces
from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.kv.block_tables import BlockAllocation
from octavo.engine.media import MediaPlaces
from octavo.engine.protocol.kv_cache_spec import UNBOUNDED
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.prompt_limits import AllocStatus
from octavo.engine.protocol.requests import EngineRequest, RequestChange
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step import RowResult, ScheduledRequest, StepPlan, StepResult
from octavo.engine.protocol.step_costs import UNMEASURED, StepCosts
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.requests.result_consumer import RequestProgress
from octavo.engine.requests.sequence_state import Finish, SequenceState
from octavo.engine.requests.stop_strings import MakeStopTexts
from octavo.engine.requests.timings import Timekeeper
from octavo.engine.scheduler.admission import Admission
from octavo.engine.scheduler.admission_control import AdmissionControl
from octavo.engine.scheduler.batching import Batching
from octavo.engine.scheduler.gauges import set_gauges
from octavo.engine.scheduler.grammar_gate import GrammarGate
from octavo.engine.scheduler.in_flight_steps import InFlightSteps, PlannedStep
from octavo.engine.scheduler.kv_allocator import KVAllocator
from octavo.engine.scheduler.micro_batch import MicroBatch
from octavo.engine.scheduler.multi_step import MultiStepPolicy
from octavo.engine.scheduler.policy import Policy
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.request_queues import RequestQueues
from octavo.engine.scheduler.step_builder import StepBuilder, StepLimits
from octavo.engine.scheduler.step_time import step_time
from octavo.engine.speculation.speculation import (
    NoSpeculation,
    Speculation,
    SpeculationOptions,
    Speculator,
)


class Scheduler:
    """Decides what each step computes, and what each request gets of its result.

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
        kv_allocator: KVAllocator,
        multi_step_policy: MultiStepPolicy,
        drafting: SpeculationOptions | None = None,
        stop_texts: MakeStopTexts | None = None,
        num_adapter_slots: int = 0,
        media_cache_tokens: int = 0,
    ) -> None:
        """`stop_texts` is for beam searches with stop strings; the frontend finds those of other
        requests.
        """
        self.blocks = blocks
        self.admission = admission
        self.kv_allocator = kv_allocator
        self.queues = RequestQueues(policy)
        self.in_flight = InFlightSteps(draws_ahead=limits.num_micro_batches == 1)
        self.adapters = AdapterPlaces(num_adapter_slots)
        self.media = MediaPlaces(media_cache_tokens)
        self.leaving: list[Request] = []
        """Finished requests whose last step is still in flight; freed when it returns."""
        self._limits = limits
        self.grammars = GrammarGate()
        self._admission_control = AdmissionControl(
            self.queues, batching, kv_allocator, self.grammars, self.adapters, limits.max_num_seqs
        )
        self._multi_step_policy = multi_step_policy
        self._stop_texts = stop_texts
        self._outputs: list[EngineOutput] = []
        """Final outputs of requests that were rejected or aborted since the last update."""
        self.times = Timekeeper()
        self._stats = EngineStats()
        self._preemption = Preemption(self.queues, kv_allocator, self.times, self._stats)
        self._speculation: Speculator = NoSpeculation()
        if drafting is not None:
            self._speculation = Speculation(blocks, self._stats, drafting)

    # -- schedule ----------------------------------------------------------------------------------

    def schedule(self, now: float, costs: StepCosts = UNMEASURED) -> StepPlan:
        """Returns the next step's plan: tokens of running requests first, then of swapped ones that
        return, then of waiting ones that start.
        """
        self.times.begin_step(now)
        self._admission_control.begin_step(now)
        queues, limits = self.queues, self._limits
        step = StepBuilder(
            now,
            costs,
            budget=limits.max_num_batched_tokens,
            max_chunk=limits.chunk(queues.waiting),
            runs_ahead=bool(self.in_flight),
            draws_ahead=bool(self.in_flight) and limits.num_micro_batches == 1,
            time=step_time(costs, limits.itl_target_s, queues.running),
        )
        step.moves += self.blocks.begin_step()
        micro_batch = MicroBatch.of(queues.running, limits.num_micro_batches)
        for request in list(queues.waiting.ranked(queues.running)):
            if step.budget == 0:
                break
            # An earlier one may have preempted it.
            if request.status is RequestStatus.RUNNING and micro_batch.has_room_for(request):
                num_rows = len(step.rows)
                self._schedule_request(request, step)
                if len(step.rows) > num_rows:
                    micro_batch.take(request)
        # Blocks that a preemption freed are for those that run on, not for others to start.
        if not (step.preempted or step.is_short):
            for request in self._admission_control.resume_swapped(step):
                self._run(request, step)
            for request in self._admission_control.admit_waiting(step):
                self._run(request, step)
        return self._build_plan(step)

    def _run(self, request: Request, step: StepBuilder) -> None:
        """Moves a request that has its blocks to the running ones, and schedules its tokens."""
        request.fork_of = None
        if request.scheduled_ts is None:
            request.scheduled_ts = step.now
        self.times.runs(request.watch)
        self.queues.run(request)
        self._schedule_request(request, step)

    def _schedule_request(self, request: Request, step: StepBuilder) -> None:
        """Adds tokens of the request's rows to the step. A beam that has none waits for the
        others.
        """
        for row in request.rows:
            start = row.num_planned_tokens
            end = step.end_of(request, row, start)
            if end == start:
                continue
            end = self.blocks.names.step_end(row.request_id, start, end)
            while (grant := self.blocks.grow(row.request_id, start, end)) is None:
                if not self._preemption.make_room(request, step):
                    return
            if not row.is_on_worker:
                step.add_new_row(request, row, self.adapters.slot_of(request.source.adapter))
                grant = BlockAllocation(self.blocks.block_ids(row.request_id), moves=grant.moves)
            step.add_row(request, row, start, end, grant)
            if request.source.media:
                self.media.use(request.source, start, end)

    def _build_plan(self, step: StepBuilder) -> StepPlan:
        """Completes a plan: draft tokens, or several decode steps if nothing waits for the next."""
        queues = self.queues
        freed_rows = self.kv_allocator.take_freed_rows()
        self.kv_allocator.stream(step)
        connector = self.blocks.connector.end_step()
        num_steps = 1
        has_drafts = self._speculation.add_drafts(step)
        is_busy = queues.swapped or len(queues.waiting) or self.in_flight or self._outputs
        if not (has_drafts or is_busy):
            num_steps = self._multi_step_policy.num_steps(step, num_running=len(queues.running))
        plan = StepPlan(
            self._stats.num_steps,
            freed_rows=freed_rows,
            new_rows=step.new_rows,
            moves=step.moves,
            rows=step.rows,
            connector=connector,
            num_steps=num_steps,
            table_ends=self.kv_allocator.take_table_ends(),
            compiles=self.grammars.take_wanted(),
            adapters=self.adapters.take_loads(),
            encodes=self.media.take_encodes(),
            dropped_media=self.media.take_dropped(),
        )
        self.in_flight.add(step)
        self._admission_control.end_step(step)
        self._stats.num_steps += 1
        self.times.planned(len(step.rows), step.waits_for if len(queues.waiting) else "")
        return plan

    # -- update ------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Advances the requests of the oldest step in flight; returns their outputs, after the
        final outputs of requests that ended between steps.
        """
        outputs, self._outputs = self._outputs, []
        step = self.in_flight.take(plan.num_steps)
        self._count(step, result)
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
            # Draft tokens that follow from the last tokens may promise more than another step.
            if goes_on and not self._speculation.should_end_decode(step.owners):
                for scheduled in plan.rows:
                    scheduled.start += 1
            else:
                self.end_decode()
        if self.leaving:
            self._free_leaving()
        return outputs

    def _update_row(
        self, request: Request, row: SequenceState, scheduled: ScheduledRequest, result: RowResult
    ) -> EngineOutput | None:
        """Advances a row by its result; returns None if its request has no output yet."""
        if result.failure is not None:
            return self._finish(request, Finish("error", error=result.failure))
        if result.prompt_logprobs:
            request.take_prompt_logprobs(scheduled.start + 1, result.prompt_logprobs)
        progress = request.consumer.take(request, row, result) if scheduled.wants else None
        if self._speculation.is_active or result.draft_ids:
            num_taken = len(result.token_ids) if progress is None else progress.num_tokens
            request.num_draft_tokens += len(scheduled.draft_ids)
            request.num_accepted_tokens += self._speculation.record(scheduled, result, num_taken)
        if scheduled.leaf_blocks:
            self.blocks.keep_path(row.request_id, result.kept_path)
        num_kept = result.num_kept
        if num_kept < scheduled.num_tokens and not self.blocks.keeps_parts:
            num_kept = 0
        row.num_computed_tokens = min(scheduled.start + num_kept, len(row.token_ids))
        if scheduled.wants and not self._limits.keeps_kv:
            row.num_computed_tokens = 0
        # A request that goes on is settled at the end of its plan: nothing looks up blocks before.
        if self.in_flight.decoding is None or (progress is not None and progress.finish):
            self._settle(row)
        return None if progress is None else self._output(request, progress)

    def _output(self, request: Request, progress: RequestProgress) -> EngineOutput | None:
        """Counts a request's new tokens, branches its rows or ends it; returns None if there is
        nothing to send yet.
        """
        if request.watch.first_token is None:
            self.times.yielded(request.watch)
            if not request.source.output_token_ids:
                self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.generation_tokens += progress.num_tokens
        if self.queues.waiting.counts_tokens:
            self.queues.waiting.took(request, progress.num_tokens)
        if progress.replaced_rows:
            self.kv_allocator.branch(progress.replaced_rows, progress.branches)
        if progress.finish is not None:
            output = self._finish(request, progress.finish)
            output.token_ids, output.logprobs = progress.token_ids, progress.logprobs
            output.beams, output.pooled = progress.beams, progress.pooled
        else:
            if request.num_exact_tokens < UNBOUNDED and request.has_outgrown:
                # Its tokens get other positions: all are computed again, and none is in flight.
                self.times.preempted(request.watch)
                self._preemption.start_over(request)
            if not progress.token_ids:
                return None
            output = EngineOutput(request.request_id, progress.token_ids, progress.logprobs)
            if request.ends_by_text:  # the frontend may end it, and then needs its timings
                output.timings = request.timings(self.times.so_far(request.watch))
        output.mirostat_mu = request.mirostat_mu
        if progress.is_first:
            request.describe_start(output)
        return output

    def _settle(self, row: SequenceState) -> None:
        """Names the blocks that a row's computed tokens fill, and frees those allocated beyond its
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

    def _count(self, step: PlannedStep, result: StepResult) -> None:
        """Counts a step's time, and the weights that it read from files in equal shares for its
        requests.
        """
        stats = self._stats
        stats.busy_s += result.busy_s
        if step.is_first:
            self.times.computed(result.busy_s)
        else:
            self.times.repeated(result.busy_s, len(step.owners))
            stats.num_steps += 1
        if result.counters is not None:
            stats.counters = result.counters
        if result.weights is not None:
            requests = {request for request, _ in step.owners}
            share = result.weights.share_since(stats.weights, max(1, len(requests)))
            stats.weights = result.weights
            for request in requests:
                request.weights += share

    def _take_reports(self, result: StepResult) -> list[EngineOutput]:
        """Passes on what a plan's first result reports beside its rows; returns the outputs of
        waiting requests whose adapters could not be loaded.
        """
        self.blocks.connector.step_done(result.connector)
        self.grammars.compiled(result.compiled)
        self.media.forget(result.not_encoded)
        if not result.adapters:
            return []
        faults = self.adapters.loaded(result.adapters)
        return [
            self._finish(request, Finish("error", error=faults[adapter.digest]))
            for request in list(self.queues.waiting.order())
            if (adapter := request.source.adapter) is not None and adapter.digest in faults
        ]

    def end_decode(self) -> None:
        """Ends a multi-step plan after the last step that was computed."""
        for request, row in self.in_flight.end_decode():
            if request.status is RequestStatus.RUNNING:
                self._settle(row)

    def plan_failed(self, plan: StepPlan) -> None:
        """Prepares for the result of a plan that failed as a whole, carried out no one knows how
        far: its rows are freed again (twice does no harm), and what it swapped out starts over.

        The requests that it computes fail at `update`. A later decode step of a plan has moved and
        freed nothing.
        """
        if self.in_flight.decoding is not None:
            return
        self.kv_allocator.free_again(self.in_flight.not_readded(plan.freed_rows))
        self.blocks.connector.step_failed()
        # Where these were not begun, they are compiled with the rows that have them.
        self.grammars.compiled(spec.digest for spec in plan.compiles)
        self.adapters.load_again(plan.adapters)
        self.media.forget(pixels.digest for pixels in plan.encodes)
        for request in self.in_flight.oldest.swapped_out:
            if request.status is RequestStatus.SWAPPED:
                self._preemption.start_over(request)

    # -- requests come and go ----------------------------------------------------------------------

    def add(self, source: EngineRequest) -> None:
        """Queues a request. One that can never fit gets its final output, an error, at the next
        update.
        """
        width = source.params.beam_width
        limits = self.admission.limits
        if width is not None:
            limits = self.admission.limits_of(self.blocks.capacity_of(width))
        num_prompt_tokens = len(source.prompt_token_ids)
        max_num_tokens = limits.max_num_tokens(num_prompt_tokens, width or 1)
        stop_texts = None
        params = source.params
        if self._stop_texts and isinstance(params, SamplingParams) and width:
            stop_texts = self._stop_texts(params) if params.stop_strings else None
        request = Request(
            source,
            max_num_tokens=max_num_tokens,
            stop_texts=stop_texts,
            original=self.blocks.original,
        )
        self._stats.num_added += 1
        self._stats.num_added_tokens += num_prompt_tokens
        self.times.arrived(request.watch)
        needed = source.params.num_needed_tokens
        decision = limits.judge(num_prompt_tokens, width, num_needed=needed)
        if decision.status is AllocStatus.NEVER:
            finish = Finish("error", error=decision.reason)
            self._outputs.append(self._final_output(request, finish))
            return
        if source.output_token_ids and request.num_tokens >= request.max_num_tokens:
            # It was shortened before an earlier core was lost, which did not end it any more.
            self._outputs.append(self._final_output(request, Finish("length")))
            return
        self.queues.add(request)
        self.grammars.want(source.grammar)
        if request.fork_of is None:
            self.kv_allocator.prefetch(request, self.queues.num_running_seqs, at_once=True)

    def change(self, change: RequestChange) -> None:
        """Gives an unfinished request other params and another priority; an unknown one (it may
        have just finished) is left alone. One that has reached its new length ends.
        """
        request = self.queues.find(change.request_id)
        if request is None:
            return
        self.queues.set_priority(request, change.priority)
        if change.computes_here:
            self.kv_allocator.forget_source(request)
        most = self.admission.limits.max_num_tokens(request.num_prompt_tokens)
        request.change(change.params, max_num_tokens=most)
        if request.num_tokens >= request.max_num_tokens:
            self.end(request.request_id, Finish("length"))

    def end(self, request_id: str, finish: Finish) -> None:
        """Ends a request and frees its blocks at once; an unknown one (it may have just finished)
        is left alone.
        """
        request = self.queues.find(request_id)
        if request is not None:
            self._outputs.append(self._finish(request, finish))
            self.queues.drop_finished()

    def _finish(self, request: Request, finish: Finish) -> EngineOutput:
        """Ends a request, frees all that it holds and returns its final output."""
        self.queues.end(request)
        self._speculation.remove_request(request)
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
        return request.final_output(finish, self.times.so_far(request.watch))

    def _free(self, request: Request) -> None:
        self.kv_allocator.free(request)
        self.adapters.release(request.request_id, request.source.adapter)

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
        """The waiting requests, in the policy's order."""
        return list(self.queues.waiting.order())

    @property
    def has_work(self) -> bool:
        """Whether a step is to be made."""
        return bool(self.queues or self._outputs or self.blocks.connector.has_work)

    @property
    def waits_for(self) -> str:
        """Reason why the first waiting request did not start in the last plan; "" where none
        waits.
        """
        return self.times.waits_for

    @property
    def waits_for_results(self) -> str:
        """Reason why no plan can be made before a step in flight is back; "" where one can."""
        return self.in_flight.reason_to_wait(self.queues.running)

    def pause_s(self, now: float) -> float:
        """Returns for how many seconds steps do nothing if no request comes or goes: a batch may
        wait until it is full.
        """
        queues = self.queues
        is_busy = queues.running or queues.swapped or self._outputs or not queues
        if is_busy or self.blocks.connector.has_work:
            return 0.0
        return max(0.0, self._admission_control.opens_at(now) - now)

    def stats(self) -> EngineStats:
        """Returns a snapshot of the counters."""
        set_gauges(self._stats, self.queues, self.blocks)
        return msgspec.structs.replace(self._stats)
