"""The share of the requests that one of several steps in flight computes.

A model whose stages compute different steps at a time is busy only where there is a step for each.
The requests that generate are therefore shared out over as many micro_batches; prompts are not,
since their chunks follow one another anyway. Source: Huang et al. 2019 (GPipe), by requests in
place of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.requests.request import Request


@dataclass(slots=True)
class MicroBatch:
    """One step's room for requests that generate; None: for all of them."""

    room: int | None

    @staticmethod
    def of(running: Sequence[Request], num_micro_batches: int) -> MicroBatch:
        """Returns the room of the next step, of `num_micro_batches` in flight."""
        if num_micro_batches == 1:
            return MicroBatch(None)
        return MicroBatch(-(-sum(map(_generates, running)) // num_micro_batches))

    def has_room_for(self, request: Request) -> bool:
        return self.room is None or self.room > 0 or not _generates(request)

    def take(self, request: Request) -> None:
        """Gives room to a request of which the step computes tokens."""
        # A prompt whose last tokens have just been planned generates from the next step on.
        if self.room is not None and _generates(request):
            self.room -= 1


def _generates(request: Request) -> bool:
    """Returns whether all tokens of a request's prompt are computed or on their way."""
    return all(row.num_planned_tokens >= request.num_prompt_tokens for row in request.rows)
