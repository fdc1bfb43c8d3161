"""Takes in what a step yielded: counts advance, full blocks get their names, requests end.

What a token means to a request is its `ResultConsumer`'s business; this carries out what the
consumer says and frees what an ended request held. Knows nothing of how steps are planned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from octavo.engine.adapters import AdapterPlaces
from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.requests.request import Request, RequestStatus
from octavo.engine.requests.result_consumer import RequestProgress
from octavo.engine.requests.timings import Timekeeper
from octavo.engine.requests.token_row import Finish, TokenRow
from octavo.engine.scheduling.grammar_gate import GrammarGate
from octavo.engine.scheduling.placement import Placement
from octavo.engine.scheduling.request_queues import RequestQueues
from octavo.engine.scheduling.steps_in_flight import PlannedStep, StepsInFlight
from octavo.engine.speculation.speculation import Speculating
from octavo.step import RowResult, ScheduledRow, StepPlan, StepResult, TokenLogprobs, WeightArrivals


@dataclass(slots=True)
class ResultIntake:
    """Turns the results of one engine's steps into outputs."""

    queues: RequestQueues
    blocks: BlockManager
    placement: Placement
    in_flight: StepsInFlight
    grammars: GrammarGate
    adapters: AdapterPlaces
    times: Timekeeper
    stats: EngineStats
    keeps_kv: bool
    speculation: Speculating
    leaving: list[Request] = field(default_factory=list)
    """Finished requests whose last step is still in flight; freed when it has come back."""
    _decoding: PlannedStep | None = None
    """The last decode step of a plan that may have further ones."""
    _num_left: int = 0
    """Most decode steps that the last plan still has."""

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Advances the requests of the oldest step in flight; returns what each of them got."""
        step = self.in_flight.take()
        self._num_left = (plan.num_steps if step.is_first else self._num_left) - 1
        self._decoding = step if self._num_left else None
        owners = step.owners
        self.times.computed(result.busy_s)
        self.stats.busy_s += result.busy_s
        if result.spilled is not None:
            self.stats.spilled = result.spilled
        if result.weights is not None:
            self._share_weights(result.weights, {request for request, _ in owners})
        if step.is_first:
            self.blocks.connector.step_done(result.connector)
        self.grammars.compiled(result.compiled)
        outputs = self._end_without_adapter(self.adapters.loaded(result.adapters))
        for (request, row), scheduled, row_result in zip(
            owners, plan.rows, result.rows, strict=True
        ):
            # Another of its rows may have failed, or an earlier step ended it.
            if request.status is RequestStatus.FINISHED:
                continue
            output = self._take(request, row, scheduled, row_result)
            if output is not None:
                outputs.append(output)
        if any(output.finish_reason is not None for output in outputs):
            self.queues.drop_finished()
        if self._decoding is not None:
            if self._may_decode_on():
                for scheduled in plan.rows:
                    scheduled.start += 1
            else:
                self.end_decode()
        self._free_leaving()
        return outputs

    # -- several decode steps of one plan ----------------------------------------------------------

    @property
    def decodes(self) -> bool:
        """Whether a plan of several decode steps has begun, and may go on."""
        return self._decoding is not None

    def repeat(self) -> None:
        """Notes that the next decode step of the last plan is computed."""
        assert self._decoding is not None, "no plan of several decode steps has begun"
        self.in_flight.repeat(self._decoding)
        self.stats.num_steps += 1
        self.times.repeated(len(self._decoding.owners))

    def end_decode(self) -> None:
        """Ends a plan of several decode steps behind the last one taken in."""
        if self._decoding is not None:
            for request, row in self._decoding.owners:
                if request.status is RequestStatus.RUNNING:
                    self._settle(row)
            self._decoding = None

    def _may_decode_on(self) -> bool:
        """Returns whether another decode step may follow: no request has ended or lost its blocks,
        and no guess that follows from the last tokens promises more.
        """
        assert self._decoding is not None
        owners = self._decoding.owners
        for request, _ in owners:
            if request.status is not RequestStatus.RUNNING:
                return False
        return not self.speculation.is_tempted(owners)

    def _share_weights(self, arrivals: WeightArrivals, requests: Collection[Request]) -> None:
        """Counts what was read for the last step for each of its requests, a share each."""
        share = arrivals.share_since(self.stats.weights, max(1, len(requests)))
        self.stats.weights = arrivals
        for request in requests:
            request.weights += share

    def _take(
        self, request: Request, row: TokenRow, scheduled: ScheduledRow, result: RowResult
    ) -> EngineOutput | None:
        """Takes in one row's result; returns None where its request has nothing to hand out."""
        if result.failure is not None:
            return self.finish(request, Finish("error", error=result.failure))
        if result.prompt_logprobs:
            request.take_prompt_logprobs(scheduled.start + 1, result.prompt_logprobs)
        progress = request.consumer.take(request, row, result) if scheduled.wants else None
        request.num_draft_tokens += len(scheduled.draft_ids)
        num_taken = len(result.token_ids) if progress is None else progress.num_tokens
        request.num_accepted_tokens += self.speculation.took(scheduled, result, num_taken)
        self._advance_row(row, scheduled, result)
        # A request that goes on is settled at the end of its plan: nothing looks up blocks before.
        if self._decoding is None or (progress is not None and progress.finish is not None):
            self._settle(row)
        return None if progress is None else self._advance(request, progress)

    def _advance_row(self, row: TokenRow, scheduled: ScheduledRow, result: RowResult) -> None:
        """Counts a row's computed tokens."""
        if scheduled.leaf_blocks:
            self.blocks.keep_path(row.request_id, result.kept_path)
        kept = scheduled.start + result.num_kept
        if result.num_kept < scheduled.num_tokens and not self.blocks.keeps_parts:
            kept = scheduled.start
        row.num_computed_tokens = min(kept, row.num_tokens)
        row.num_tokens_in_flight -= scheduled.num_tokens
        if not self.keeps_kv and scheduled.wants:
            row.num_computed_tokens = 0

    def _settle(self, row: TokenRow) -> None:
        """Names the blocks that a row's computed tokens fill, and gives back those that were
        granted beyond its end.
        """
        if self.keeps_kv:
            self.blocks.record(
                row.request_id,
                row.token_ids,
                row.num_computed_tokens,
                in_flight=row.num_tokens_in_flight > 0,
            )
        self.placement.give_back(row)

    def _advance(self, request: Request, progress: RequestProgress) -> EngineOutput | None:
        """Carries out what came of the results of all of a request's rows; returns None where there
        is nothing to hand out yet.
        """
        if request.watch.first_token is None:
            self.times.yielded(request.watch)
            if not request.source.output_token_ids:
                self.stats.prompt_tokens += request.num_prompt_tokens
        self.stats.generation_tokens += progress.num_tokens
        self.queues.waiting.took(request, progress.num_tokens)
        if progress.replaced_rows:
            self.placement.branch(progress.replaced_rows, progress.branches)
        if progress.finish is not None:
            output = self.finish(request, progress.finish)
            output.token_ids = progress.token_ids
            output.logprobs = progress.logprobs
            output.beams = progress.beams
            output.pooled = progress.pooled
        elif progress.token_ids:
            output = self._output(request, progress.token_ids, progress.logprobs)
        else:
            output = None
        if progress.finish is None and request.has_outgrown:
            self._start_over(request)
        if output is None:
            return None
        output.mirostat_mu = request.mirostat_mu
        if progress.is_first:
            request.describe_start(output)
        return output

    def _start_over(self, request: Request) -> None:
        """Has a request computed again that has outgrown its original context: no step in flight
        computes it, since its next token is planned at other positions.
        """
        self.times.preempted(request.watch)
        self.placement.free(request)
        self.queues.start_over(request)

    def _output(
        self, request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> EngineOutput:
        """Returns new tokens of a request that goes on, as far as this plane knows: the front may
        end it by a stop string, and then needs its timings.
        """
        timings = None
        if request.params.ends_by_text:
            timings = request.timings(self.times.so_far(request.watch))
        return EngineOutput(request.request_id, token_ids, logprobs, timings=timings)

    def _end_without_adapter(self, faults: Mapping[bytes, str]) -> list[EngineOutput]:
        """Ends the waiting requests whose adapters could not be loaded."""
        if not faults:
            return []
        return [
            self.finish(request, Finish("error", error=faults[adapter.digest]))
            for request in list(self.queues.waiting.order())
            if (adapter := request.source.adapter) is not None and adapter.digest in faults
        ]

    # -- requests end ------------------------------------------------------------------------------

    def finish(self, request: Request, finish: Finish) -> EngineOutput:
        """Ends a request, frees all that it holds and returns its final output."""
        self.queues.end(request)
        self.speculation.forget(request)
        self.placement.sent(request)
        if finish.reason == "error":
            self.placement.forget(request)
        # A step in flight still writes to its blocks and reads its row.
        if self.in_flight.computes(request):
            self.leaving.append(request)
        else:
            self._free(request)
        return self.final_output(request, finish)

    def final_output(self, request: Request, finish: Finish) -> EngineOutput:
        return request.final_output(finish, self.times.so_far(request.watch))

    def _free(self, request: Request) -> None:
        self.placement.free(request)
        self.adapters.release(request.request_id, request.source.adapter)

    def _free_leaving(self) -> None:
        still_computed = []
        for request in self.leaving:
            if self.in_flight.computes(request):
                still_computed.append(request)
            else:
                self._free(request)
        self.leaving = still_computed
