"""Startup of the first rank: starts and joins the other ranks, and determines the common number of
KV blocks.

Every function also works for an engine with one rank, for which `others` is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.engine.protocol.kv_messages import ConnectorReport
from octavo.engine.protocol.ports import ConnectorWorker
from octavo.executor.ranks import Abortable, RankRendezvous
from octavo.utils.progress import Report
from octavo.worker.loaded_model import LoadedModel
from octavo.worker.memory import KvBudget
from octavo.worker.ranks.messages import (
    Allocate,
    FittingBlocks,
    Measure,
    RankLoaded,
    RankReady,
    RankSlots,
    RankStarted,
)
from octavo.worker.worker import Worker

if TYPE_CHECKING:
    from octavo.worker.ranks.other_ranks import OtherRanks, StartRank
    from octavo.worker.ranks.ranked_worker import RankedWorker
    from octavo.worker.stages.pipelined_worker import PipelinedWorker

Joined = TypeVar("Joined", bound=Abortable)


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """A connector whose blocks are split over all ranks."""

    slots: RankSlots
    take_report: Callable[[int, ConnectorReport], None]
    """Receives a rank's report; called from other threads."""


def start_ranks(
    build: str,
    options: dict[str, Any],
    num_ranks: int,
    rendezvous: RankRendezvous,
    join: Callable[[], Joined],
    *,
    start: StartRank | None = None,
) -> tuple[Joined, OtherRanks]:
    """Starts the other ranks and joins them.

    `build` is the name of a `process.BuildRank` as "module:function"; `join` makes this process the
    first rank. Without `start`, the other ranks are local processes.
    """
    from octavo.worker.ranks.other_ranks import OtherRanks, start_here

    others = OtherRanks(build, options, num_ranks, rendezvous, start or start_here)
    try:
        others.expect(RankStarted)
        ranks = join()
        others.when_lost(lambda error: ranks.abort())
        return ranks, others
    except BaseException as error:
        raise end_ranks(others, error) from None


def end_ranks(others: OtherRanks, error: BaseException) -> BaseException:
    """Ends the other ranks because of `error`. Returns the error to raise: the end of another rank,
    if that is the cause.
    """
    lost = others.lost
    others.close(patience_s=0.0)
    return lost or error


def common_budget(loaded: LoadedModel, others: OtherRanks | None) -> KvBudget:
    """Returns the KV blocks that fit on every rank; measured after all have loaded."""
    if others is None:
        return loaded.kv_budget()
    others.expect(RankLoaded)
    others.send(Measure())
    budget = loaded.kv_budget()
    fits = [budget.num_blocks, *(report.num_blocks for report in others.expect(FittingBlocks))]
    return replace(budget, num_blocks=tuple(map(min, zip(*fits, strict=True))))


def common_worker(
    loaded: LoadedModel,
    others: OtherRanks | None,
    num_blocks: Sequence[int],
    num_host_blocks: Sequence[int],
    *,
    connector: ConnectorWorker | None,
    sharing: SharedSlots | None,
    report: Report,
) -> Worker | RankedWorker | PipelinedWorker:
    """Allocates the KV cache on every rank (block counts are per cache group) and returns the
    executor. `sharing`: connector whose blocks are split over the ranks; None without one.
    """
    if others is not None:
        if sharing is not None:
            others.when_reported(sharing.take_report)
        slots = None if sharing is None else sharing.slots
        others.send(Allocate(list(num_blocks), list(num_host_blocks), slots))
    worker = loaded.worker(num_blocks, num_host_blocks, connector, report)
    if others is None:
        return worker
    from octavo.worker.ranks.ranked_worker import RankedWorker
    from octavo.worker.stages.pipelined_worker import PipelinedWorker

    others.expect(RankReady)
    if loaded.link is not None:
        return PipelinedWorker(worker, others, loaded.link)
    return RankedWorker(worker, others)
