"""The steps that are planned and not taken in, and whether one more may be planned before they
are: the one place that decides it.

A plan that is made ahead counts on how many tokens each row will have after the steps before it,
whatever these tokens are; the device fills them in. A row whose draw depends on the last token
itself sits out until that has come back, and holds up no other row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.requests.request import Request
from octavo.engine.requests.sequence_state import SequenceState
from octavo.engine.scheduler.step_builder import StepBuilder

SWAPPING = "blocks are on their way to the host"
"""Reason to wait after a swap: if that step fails, the swapped requests start over."""
SHORT = "a request is to be preempted whose blocks a step in flight writes"
"""Reason to wait where a row found no block: preempting is left until nothing is in flight."""
ALL_MAY_END = "no request has a token to compute until a step in flight is back"
"""Reason to wait where each running request may end with the token that is being drawn."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The part of a plan that is remembered until its result comes."""

    owners: list[tuple[Request, SequenceState]]
    """Request and row of each row of the plan."""
    new_rows: list[str]
    swapped_out: list[Request]
    is_short: bool
    is_first: bool = True
    """Whether it is the first decode step of its plan."""


class InFlightSteps:
    """Planned steps in their order, which is that of their results."""

    def __init__(self, *, draws_ahead: bool = True) -> None:
        """`draws_ahead`: a step may compute tokens that one in flight has not drawn yet."""
        self._draws_ahead = draws_ahead
        self._steps: deque[PlannedStep] = deque()
        self.decoding: PlannedStep | None = None
        """Last decode step of a plan that may have further ones."""
        self._num_left = 0
        """Most decode steps that the last plan still has."""

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, builder: StepBuilder) -> None:
        self._steps.append(
            PlannedStep(
                builder.owners,
                [new.request_id for new in builder.new_rows],
                builder.swapped_out,
                builder.is_short,
            )
        )

    def repeat(self) -> int:
        """Adds the next decode step of the last plan; returns its number of rows."""
        assert self.decoding is not None, "no plan of several decode steps has begun"
        owners = self.decoding.owners
        for _, row in owners:
            row.num_tokens_in_flight += 1
        self._steps.append(PlannedStep(owners, [], [], is_short=False, is_first=False))
        return len(owners)

    def end_decode(self) -> list[tuple[Request, SequenceState]]:
        """Ends a plan of several decode steps; returns its requests and rows, [] if there is
        none.
        """
        step, self.decoding = self.decoding, None
        return [] if step is None else step.owners

    @property
    def oldest(self) -> PlannedStep:
        """The step whose results come next."""
        return self._steps[0]

    def take(self, num_steps: int) -> PlannedStep:
        """Removes and returns the oldest step, whose result has come; its plan has `num_steps`
        decode steps.
        """
        step = self._steps.popleft()
        self._num_left = (num_steps if step.is_first else self._num_left) - 1
        self.decoding = step if self._num_left else None
        return step

    def computes(self, request: Request) -> bool:
        """Returns whether a step in flight writes to the request's blocks and reads its row."""
        return any(owner is request for step in self._steps for owner, _ in step.owners)

    def not_given_away(self, freed_rows: Sequence[str]) -> list[str]:
        """Returns those of the rows freed by the oldest step that no later step has made again."""
        again = {name for step in list(self._steps)[1:] for name in step.new_rows}
        return [name for name in freed_rows if name not in again]

    def reason_to_wait(self, running: Sequence[Request]) -> str:
        """Returns why the next plan needs results that have not come; "" where some request can go
        on without them.
        """
        last = self._steps[-1]
        if last.swapped_out or last.is_short:
            return SWAPPING if last.swapped_out else SHORT
        reason = ALL_MAY_END
        for request in running:
            if (self._draws_ahead and request.may_run_ahead) or _has_tokens_to_plan(request):
                return ""
            reason = request.consumer.needs_last_token or reason
        return reason


def _has_tokens_to_plan(request: Request) -> bool:
    """Returns whether tokens are known that no step computes yet."""
    return any(row.num_planned_tokens < row.num_tokens for row in request.rows)
