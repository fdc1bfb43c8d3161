"""What the first rank does before the first step: starts the others, meets them, agrees with them
on a number of KV blocks.

Where there are no others (None), what it would do alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo.backends.devices import Device
from octavo.ports import ConnectorWorker
from octavo.progress import Report
from octavo.worker.loaded_model import LoadedModel
from octavo.worker.memory import KvBudget
from octavo.worker.ranks.messages import Allocate, Fits, Loaded, Measure, Ready, Started
from octavo.worker.worker import Worker

if TYPE_CHECKING:
    from octavo.backends.torch.ranks import TorchRanks
    from octavo.worker.ranks.other_ranks import OtherRanks
    from octavo.worker.ranks.ranked_worker import RankedWorker


def start_ranks(
    build: str, options: dict[str, Any], num_ranks: int, device: Device
) -> tuple[TorchRanks, OtherRanks]:
    """`build` names what loads the others ("module:function", a `process.BuildRank`). PyTorch must
    have been found.
    """
    from octavo.backends.torch.ranks import Rendezvous, TorchRanks
    from octavo.worker.ranks.other_ranks import OtherRanks

    rendezvous = Rendezvous(num_ranks)
    others = OtherRanks(build, options, num_ranks, rendezvous.port)
    try:
        others.expect(Started)
        ranks = TorchRanks(0, num_ranks, device, rendezvous)
        others.when_lost(lambda error: ranks.abort())
        return ranks, others
    except BaseException as error:
        raise end_ranks(others, error) from None


def end_ranks(others: OtherRanks, error: BaseException) -> BaseException:
    """Ends them for it. What ended one of them by itself stands behind whatever this process has
    met.
    """
    lost = others.lost
    others.close(patience_s=0.0)
    return lost or error


def common_budget(loaded: LoadedModel, others: OtherRanks | None) -> KvBudget:
    """As many blocks as fit on every rank; measured once all have loaded."""
    if others is None:
        return loaded.kv_budget()
    others.expect(Loaded)
    others.send(Measure())
    budget = loaded.kv_budget()
    fits = [budget.num_blocks, *(said.num_blocks for said in others.expect(Fits))]
    return replace(budget, num_blocks=tuple(map(min, zip(*fits, strict=True))))


def common_worker(
    loaded: LoadedModel,
    others: OtherRanks | None,
    num_blocks: Sequence[int],
    num_host_blocks: Sequence[int],
    *,
    connector: ConnectorWorker | None,
    report: Report,
) -> Worker | RankedWorker:
    """With memory for so many blocks of each group on every rank."""
    if others is not None:
        others.send(Allocate(list(num_blocks), list(num_host_blocks)))
    worker = loaded.worker(num_blocks, num_host_blocks, connector, report)
    if others is None:
        return worker
    from octavo.worker.ranks.ranked_worker import RankedWorker

    others.expect(Ready)
    return RankedWorker(worker, others)
