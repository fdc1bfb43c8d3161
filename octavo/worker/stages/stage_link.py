"""The pipes that connect the pipeline stages of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.worker.stages.hand_over import HiddenReceiver, HiddenSender

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

NO_PIPE = -1
"""Descriptor for no pipe."""


@dataclass(frozen=True, slots=True)
class StageLink:
    """A stage's number, and its ends of the pipes to the adjacent stages.

    Implements `ranks.Abortable`.
    """

    stage: int
    num_stages: int
    before: HiddenReceiver | None
    """Receives hidden states from the previous stage; None on the first stage."""
    behind: HiddenSender | None
    """Sends hidden states to the next stage; None on the last stage."""

    def abort(self) -> None:
        """Does nothing: when a stage ends, its pipe breaks, which ends any wait for it."""

    def close(self) -> None:
        if self.before is not None:
            self.before.close()
        if self.behind is not None:
            self.behind.close()


class StagePipes:
    """The pipes of all stages, created by the process of the last stage before it starts the
    others.

    The last stage is rank 0, which samples; rank r is stage r - 1. Implements
    `ranks.RankRendezvous`.
    """

    def __init__(self, num_stages: int) -> None:
        from multiprocessing import Pipe

        self._num_stages = num_stages
        self._pipes = [Pipe(duplex=False) for _ in range(num_stages - 1)]

    def get_address(self, rank: int) -> list[int]:
        """Returns the descriptors of the pipes that a rank reads from and writes to."""
        before, behind = self._get_ends(rank)
        return [NO_PIPE if end is None else end.fileno() for end in (before, behind)]

    def get_inherited(self, rank: int) -> tuple[int, ...]:
        return tuple(end.fileno() for end in self._get_ends(rank) if end is not None)

    def join(self) -> StageLink:
        """Makes this process the last stage. Closes the other stages' ends here, so that a pipe
        breaks when its stage ends.
        """
        last, _ = self._get_ends(0)
        assert last is not None
        self.close(keep=last)
        return StageLink(
            self._num_stages - 1,
            self._num_stages,
            HiddenReceiver(last, get_stage_name(self._num_stages - 2, self._num_stages)),
            None,
        )

    def close(self, keep: Connection | None = None) -> None:
        for end in (end for pipe in self._pipes for end in pipe):
            if end is not keep and not end.closed:
                end.close()

    def _get_ends(self, rank: int) -> tuple[Connection | None, Connection | None]:
        stage = get_stage(rank, self._num_stages)
        before = self._pipes[stage - 1][0] if stage else None
        behind = self._pipes[stage][1] if stage + 1 < self._num_stages else None
        return before, behind


def get_stage(rank: int, num_stages: int) -> int:
    return num_stages - 1 if rank == 0 else rank - 1


def get_stage_name(stage: int, num_stages: int) -> str:
    """Returns a stage's name for error messages."""
    return f"stage {stage} of {num_stages}"


def join_stage(rank: int, num_stages: int, address: Sequence[int]) -> StageLink:
    """Makes this process a stage (or another rank of the last stage), given its address."""
    from multiprocessing.connection import Connection

    before, behind = address
    stage = get_stage(rank, num_stages)
    receiver = sender = None
    if before != NO_PIPE:
        source = get_stage_name(stage - 1, num_stages)
        receiver = HiddenReceiver(Connection(before, writable=False), source)
    if behind != NO_PIPE:
        sender = HiddenSender(Connection(behind, readable=False))
    return StageLink(stage, num_stages, receiver, sender)
