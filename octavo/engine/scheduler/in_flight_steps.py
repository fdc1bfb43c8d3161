"""Launched steps whose results are outstanding, and whether another may be scheduled before they
arrive.

A step scheduled ahead knows how many tokens each row will have after the earlier steps, but not
their ids; the device fills them in. A row whose sampling depends on the last token's id waits until
that has arrived, without delaying other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step import StepResult
from octavo.engine.requests.request import Request
from octavo.engine.requests.sequence_state import SequenceState
from octavo.engine.requests.timings import Timekeeper
from octavo.engine.scheduler.step_builder import StepBuilder

REQUEST_ID = attrgetter("request_id")
SWAPPING = "blocks are on their way to the host"
"""Reason to wait after a swap: if that step fails, the swapped requests start over."""
SHORT = "a request is to be preempted whose blocks a step in flight writes"
"""Reason to wait if a row found no free block: nothing is preempted while a step is in flight."""
ALL_MAY_END = "no request has a token to compute until a step in flight is back"
"""Reason to wait if each running request may end with the token that is being sampled."""


@dataclass(slots=True)
class PlannedStep:
    """The part of a plan that `Scheduler.update` needs."""

    owners: list[tuple[Request, SequenceState]]
    """Request and row of each row of the plan."""
    new_rows: list[str]
    swapped_out: list[Request]
    is_short: bool
    is_first: bool = True
    """Whether the next result belongs to the plan's first step."""

    def count(self, result: StepResult, stats: EngineStats, times: Timekeeper) -> None:
        """Adds the step's time to the statistics, and to each request an equal part of the weights
        that the step read from files.
        """
        stats.busy_s += result.busy_s
        if self.is_first:
            times.computed(result.busy_s)
        else:
            times.repeated(result.busy_s, len(self.owners))
            stats.num_steps += 1
        if result.counters is not None:
            stats.counters = result.counters
        if result.weights is not None:
            requests = {request for request, _ in self.owners}
            share = result.weights.share_since(stats.weights, max(1, len(requests)))
            stats.weights = result.weights
            for request in requests:
                request.weights += share


class InFlightSteps:
    """Queue of in-flight steps; results arrive in the same order."""

    def __init__(self, *, samples_ahead: bool = True) -> None:
        """`samples_ahead`: a step may compute tokens that an in-flight step has not sampled yet."""
        self._samples_ahead = samples_ahead
        self.steps: deque[PlannedStep] = deque()
        """Launched plans, oldest first."""
        self.decoding: PlannedStep | None = None
        """The multi-step plan that is being executed."""
        self._num_left = 0
        """Maximum number of remaining steps in that plan."""

    def add(self, builder: StepBuilder) -> None:
        new_rows = list(map(REQUEST_ID, builder.new_rows))
        self.steps.append(
            PlannedStep(builder.owners, new_rows, builder.swapped_out, builder.is_short)
        )

    def end_decode(self) -> list[tuple[Request, SequenceState]]:
        """Ends a multi-step plan; returns its requests and rows, [] if there is none."""
        step, self.decoding = self.decoding, None
        return [] if step is None else step.owners

    def pop(self, num_steps: int) -> PlannedStep:
        """Returns the step whose result has arrived: the current multi-step plan's next one, or the
        oldest in-flight step, which is removed and may have up to `num_steps` decode steps.
        """
        if self.decoding is not None:
            step = self.decoding
            step.is_first = False
            self._num_left -= 1
        else:
            step = self.steps.popleft()
            self._num_left = num_steps - 1
        self.decoding = step if self._num_left else None
        return step

    def computes(self, request: Request) -> bool:
        """Returns whether an in-flight step computes the request."""
        for step in self.steps:
            for owner, _ in step.owners:
                if owner is request:
                    return True
        return False

    def not_readded(self, freed_rows: Sequence[str]) -> list[str]:
        """Returns the rows that the oldest step freed and no later step has added again."""
        again = {name for step in list(self.steps)[1:] for name in step.new_rows}
        return [name for name in freed_rows if name not in again]

    def reason_to_wait(self, running: Sequence[Request]) -> str:
        """Returns why the next plan needs outstanding results; "" if some request can be scheduled
        without them.
        """
        last = self.steps[-1]
        if last.swapped_out or last.is_short:
            return SWAPPING if last.swapped_out else SHORT
        reason = ALL_MAY_END
        for request in running:
            if (self._samples_ahead and request.may_run_ahead) or _has_tokens_to_plan(request):
                return ""
            reason = request.consumer.needs_last_token or reason
        return reason


def _has_tokens_to_plan(request: Request) -> bool:
    """Returns whether a row has known tokens that are not scheduled yet."""
    return any(row.num_planned_tokens < row.num_tokens for row in request.rows)
