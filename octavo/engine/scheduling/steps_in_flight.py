"""The steps that are planned and not taken in, and whether one more may be planned before they are:
the one place that decides it.

A plan that is made ahead counts on what the steps before it will yield: how many tokens each row
has then, whatever they are. The device fills in the tokens. What depends on a token itself, or on
who ends with it, waits for the results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.requests.request import Request
from octavo.engine.requests.token_row import TokenRow
from octavo.engine.scheduling.step_builder import StepBuilder

SWAPPING = "blocks are on their way to the host"
"""If that step fails, whoever they belong to starts over."""
SHORT = "somebody is to be preempted, whose blocks a step in flight writes"
ALL_MAY_END = "nobody has anything to compute until a step in flight is back"


@dataclass(frozen=True, slots=True)
class PlannedStep:
    owners: list[tuple[Request, TokenRow]]
    """Of each of its rows."""
    new_rows: list[str]
    swapped_out: list[Request]
    is_short: bool


class StepsInFlight:
    """In the order of their plans, which is that of their results."""

    def __init__(self) -> None:
        self._steps: deque[PlannedStep] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, builder: StepBuilder) -> None:
        self._steps.append(
            PlannedStep(
                builder.owners,
                [new.request_id for new in builder.new_rows],
                builder.swapped_out,
                builder.is_short,
            )
        )

    @property
    def oldest(self) -> PlannedStep:
        return self._steps[0]

    def take(self) -> PlannedStep:
        """The oldest, whose results are here."""
        return self._steps.popleft()

    def computes(self, request: Request) -> bool:
        """Whether one of them writes to its blocks and reads its row."""
        return any(owner is request for step in self._steps for owner, _ in step.owners)

    def not_given_away(self, freed_rows: Sequence[str]) -> list[str]:
        """Of those that the oldest frees: a later one may have made a row of the same name."""
        again = {name for step in list(self._steps)[1:] for name in step.new_rows}
        return [name for name in freed_rows if name not in again]

    def reason_to_wait(self, running: Sequence[Request]) -> str:
        """Why the next plan needs results that are not here; "" where it does not."""
        last = self._steps[-1]
        if last.swapped_out or last.is_short:
            return SWAPPING if last.swapped_out else SHORT
        anybody_goes_on = False
        for request in running:
            if request.waits_for_tokens:
                return request.waits_for_tokens
            anybody_goes_on = (
                anybody_goes_on
                or request.may_go_on
                or request.num_planned_tokens < request.num_tokens
            )
        return "" if anybody_goes_on else ALL_MAY_END
