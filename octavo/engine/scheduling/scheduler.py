"""The control plane's one face to the core: requests in, a plan for each step, outputs from its
result.

Owns the requests' tokens, counts and states through `RequestQueues`; `StepPlanner` plans,
`ResultIntake` takes in. Reads no clock and measures nothing (time and costs are arguments), so that
a recording replays exactly, and sees neither text nor arrays. This is the door to the room; the
package's docstring says in which order to read the rest.
"""

from __future__ import annotations

import msgspec

from octavo.engine.adapters import AdapterPlaces
from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.media import MediaPlaces
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.prompt_limits import Verdict
from octavo.engine.protocol.requests import EngineRequest, RequestChange
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.requests.stop_strings import MakeStopTexts
from octavo.engine.requests.timings import STEP_RUNNING, Timekeeper
from octavo.engine.requests.token_row import Finish
from octavo.engine.scheduling.admission import NO_BLOCKS, Admission
from octavo.engine.scheduling.batching import Batching
from octavo.engine.scheduling.grammar_gate import GrammarGate
from octavo.engine.scheduling.multi_step import MultiStepPolicy
from octavo.engine.scheduling.placement import Placement
from octavo.engine.scheduling.policy import Policy
from octavo.engine.scheduling.request_queues import RequestQueues
from octavo.engine.scheduling.result_intake import ResultIntake
from octavo.engine.scheduling.step_planner import StepLimits, StepPlanner
from octavo.engine.scheduling.steps_in_flight import StepsInFlight
from octavo.engine.speculation.speculation import (
    Drafting,
    NoSpeculation,
    Speculating,
    Speculation,
)
from octavo.engine.step_costs import UNMEASURED, StepCosts
from octavo.outputs import Timings
from octavo.sampling_params import SamplingParams
from octavo.step import StepPlan, StepResult


class Scheduler:
    """Decides what each step computes, and says what every request got of it.

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
        multi_step_policy: MultiStepPolicy,
        drafting: Drafting | None = None,
        stop_texts: MakeStopTexts | None = None,
        num_adapter_slots: int = 0,
        media_cache_tokens: int = 0,
    ) -> None:
        """Takes `stop_texts` for beam searches with stop strings; those of other requests are found
        by the front.
        """
        self.blocks = blocks
        self.admission = admission
        self.placement = placement
        self.queues = RequestQueues(policy)
        self.in_flight = StepsInFlight(draws_ahead=limits.num_lanes == 1)
        self._grammars = GrammarGate()
        self.adapters = AdapterPlaces(num_adapter_slots)
        self.media = MediaPlaces(media_cache_tokens)
        self._batching = batching
        self._stop_texts = stop_texts
        self._outputs: list[EngineOutput] = []
        """Final outputs of requests that were refused or aborted since the last update."""
        self._times = Timekeeper()
        self._stats = EngineStats()
        speculation: Speculating = NoSpeculation()
        if drafting is not None:
            speculation = Speculation(blocks, self._stats, drafting)
        self._planner = StepPlanner(
            limits=limits,
            queues=self.queues,
            blocks=blocks,
            batching=batching,
            placement=placement,
            multi_step_policy=multi_step_policy,
            speculation=speculation,
            in_flight=self.in_flight,
            grammars=self._grammars,
            adapters=self.adapters,
            media=self.media,
            times=self._times,
            stats=self._stats,
        )
        self._intake = ResultIntake(
            queues=self.queues,
            blocks=blocks,
            placement=placement,
            in_flight=self.in_flight,
            grammars=self._grammars,
            adapters=self.adapters,
            times=self._times,
            stats=self._stats,
            keeps_kv=limits.keeps_kv,
            speculation=speculation,
        )

    # -- a step ------------------------------------------------------------------------------------

    def schedule(self, now: float, costs: StepCosts = UNMEASURED) -> StepPlan:
        """Returns the next step's plan. Outputs that wait to be handed out make it a short one."""
        return self._planner.plan(now, costs, single_step=bool(self._outputs))

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Takes in the result of the oldest step in flight; returns what each of its requests got,
        after the final outputs of requests that ended between steps.
        """
        outputs, self._outputs = self._outputs, []
        self.media.forget(result.not_encoded)
        return outputs + self._intake.update(plan, result)

    @property
    def decodes(self) -> bool:
        """Whether the last plan, of several decode steps, may go on with the next one."""
        return self._intake.decodes

    def repeat(self) -> None:
        """Notes that the next decode step of the last plan is computed; `update` takes it in."""
        self._intake.repeat()

    def end_decode(self) -> None:
        """Ends a plan of several decode steps behind the last one that was taken in."""
        self._intake.end_decode()

    def plan_failed(self, plan: StepPlan) -> None:
        """Prepares for the result of a plan that failed as a whole, carried out no one knows how
        far: its rows are freed again (twice does no harm), and what it swapped out starts over.

        The requests that it computes fail at `update`. A later decode step of a plan has moved and
        freed nothing.
        """
        if not self.in_flight.oldest.is_first:
            return
        self.placement.free_again(self.in_flight.not_given_away(plan.freed_rows))
        self.blocks.connector.step_failed()
        # Where these were not begun, they are compiled with the rows that have them.
        self._grammars.compiled(spec.digest for spec in plan.compiles)
        self.adapters.load_again(plan.adapters)
        self.media.forget(pixels.digest for pixels in plan.encodes)
        for request in self.in_flight.oldest.swapped_out:
            if request.status is RequestStatus.SWAPPED:
                self._planner.start_over(request)

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
        self._times.arrived(request.watch)
        needed = source.params.num_needed_tokens
        decision = limits.judge(num_prompt_tokens, width, num_needed=needed)
        if decision.verdict is Verdict.NEVER:
            finish = Finish("error", error=decision.reason)
            self._outputs.append(self._intake.final_output(request, finish))
            return
        if source.output_token_ids and request.num_tokens >= request.max_num_tokens:
            # It was shortened before an earlier core was lost, which did not end it any more.
            self._outputs.append(self._intake.final_output(request, Finish("length")))
            return
        self.queues.add(request)
        self._grammars.want(source.grammar)
        if request.fork_of is None:
            self.placement.prefetch(request, self.queues.num_running_seqs, at_once=True)

    def change(self, change: RequestChange) -> None:
        """Gives an unfinished request other params and another priority; an unknown one (it may
        have just finished) is left alone. One that has reached its new length ends.
        """
        request = self.queues.find(change.request_id)
        if request is None:
            return
        self.queues.set_priority(request, change.priority)
        if change.computes_here:
            self.placement.forget_source(request)
        most = self.admission.limits.max_num_tokens(request.num_prompt_tokens)
        request.change(change.params, max_num_tokens=most)
        if request.num_tokens >= request.max_num_tokens:
            self._end(request.request_id, Finish("length"))

    def abort(self, request_id: str) -> None:
        """Ends a request and frees its blocks at once; an unknown one (it may have just finished)
        is left alone.
        """
        self._end(request_id, Finish("abort"))

    def fail(self, request_id: str, error: str) -> None:
        """Ends a request as `abort` does, for a reason that is not the user's."""
        self._end(request_id, Finish("error", error=error))

    def _end(self, request_id: str, finish: Finish) -> None:
        request = self.queues.find(request_id)
        if request is not None:
            self._outputs.append(self._intake.finish(request, finish))
            self.queues.drop_finished()

    # -- what others ask ---------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        """The running requests, in the order of their start."""
        return self.queues.running

    @property
    def swapped(self) -> list[Request]:
        """Requests whose blocks are in host memory."""
        return self.queues.swapped

    @property
    def leaving(self) -> list[Request]:
        """Finished requests whose last step is still in flight; freed when it returns."""
        return self._intake.leaving

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests, in the policy's order."""
        return list(self.queues.waiting.order())

    @property
    def has_work(self) -> bool:
        """Whether a step is to be made."""
        return bool(self.queues or self._outputs or self.blocks.connector.has_work)

    @property
    def next_to_run(self) -> str | None:
        """The request that runs before all others that do not run now; None where all run."""
        first = self.queues.first_idle
        return None if first is None else first.request_id

    @property
    def is_compiling(self) -> bool:
        """Whether requests wait for a grammar that the worker compiles."""
        return self._grammars.is_compiling

    @property
    def waits_for(self) -> str:
        """Reason why the first waiting request did not start in the last plan; "" where none
        waits.
        """
        return self._times.waits_for

    def reason_to_wait(self, request: Request) -> str:
        """Returns why an unfinished request does not run."""
        if request.status is RequestStatus.SWAPPED:
            return NO_BLOCKS.reason
        return self._times.waits_for or STEP_RUNNING

    def times_of(self, request: Request) -> Timings:
        """Returns where an unfinished request's time went so far."""
        return request.timings(self._times.so_far(request.watch))

    @property
    def waits_for_results(self) -> str:
        """Reason why no plan can be made before a step in flight is back; "" where one can."""
        return self.in_flight.reason_to_wait(self.running)

    def pause_s(self, now: float) -> float:
        """Returns for how many seconds steps do nothing if no request comes or goes: a batch may
        wait until it is full.
        """
        queues = self.queues
        is_busy = queues.running or queues.swapped or self._outputs or not queues
        if is_busy or self.blocks.connector.has_work:
            return 0.0
        return max(0.0, self._batching.opens_at(self._planner.batching_state(now)) - now)

    def stats(self) -> EngineStats:
        """Returns a snapshot of the counters."""
        stats, blocks = self._stats, self.blocks
        stats.num_running = self.queues.num_running_seqs
        stats.num_swapped = len(self.queues.swapped)
        stats.num_waiting = len(self.queues.waiting)
        stats.num_waiting_tokens = self.queues.num_waiting_tokens
        stats.num_blocks = blocks.num_blocks
        stats.num_used_blocks = blocks.num_blocks - blocks.num_free_blocks
        stats.num_host_blocks = blocks.host.num_used_blocks
        stats.groups = [pool.counts() for pool in blocks.pools]
        found = blocks.prefix_counts
        stats.prefix_query_tokens = found.num_queried
        stats.prefix_hit_tokens = found.num_hits
        stats.external_query_tokens = found.num_external_queried
        stats.external_hit_tokens = found.num_external_hits
        stats.left_out_blocks = found.num_left_out
        stats.connector = blocks.connector.snapshot()
        return msgspec.structs.replace(stats)
