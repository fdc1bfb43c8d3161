"""Micro-batches for pipeline parallelism: the decoding requests of one of several in-flight steps.

Pipeline stages are busy only if each has a step to compute, so the decoding requests are divided
into one micro-batch per stage. Prompts are not divided, since their chunks are computed one after
the other anyway. Source: GPipe (Huang et al. 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.requests.request import Request


@dataclass(slots=True)
class MicroBatch:
    """Number of decoding requests that may still be added to a step."""

    room: int

    @staticmethod
    def of(running: Sequence[Request], num_micro_batches: int) -> MicroBatch:
        """Returns the limit of the next step if `num_micro_batches` steps are in flight."""
        return MicroBatch(-(-sum(map(_generates, running)) // num_micro_batches))

    def has_room_for(self, request: Request) -> bool:
        return self.room > 0 or not _generates(request)

    def add(self, request: Request) -> None:
        """Counts a request that was added to the step."""
        # A prompt whose last tokens were just scheduled starts decoding in the next step.
        if _generates(request):
            self.room -= 1


def _generates(request: Request) -> bool:
    """Returns whether all prompt tokens of a request are computed or in flight."""
    return all(row.num_planned_tokens >= request.num_prompt_tokens for row in request.rows)
