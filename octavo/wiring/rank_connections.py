"""A process's position among the ranks of an engine.

Ranks are numbered by stage, last stage first, so that rank 0 samples; within a stage as in
`RankGrid`. A rank synchronizes with its stage within a step, and sends hidden states to the rank
with the same index in the next stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.config.engine_config import EngineConfig
from octavo.executor.rank_grid import RankGrid
from octavo.executor.ranks import Ranks
from octavo.worker.stages.stage_link import StageLink

if TYPE_CHECKING:
    from octavo.executor.native.ranks import EngineRanks


@dataclass(frozen=True, slots=True)
class RankConnections:
    """A process's rank and its connections. Implements `ranks.Abortable`."""

    rank: int = 0
    ranks: Ranks[Any] | None = None
    """Ranks of its stage; None if it is the only one."""
    link: StageLink | None = None
    """Previous and next stage; None with one stage."""
    engines: EngineRanks | None = None
    """Ranks of its stage in all engines that share experts; None without expert sharing."""
    engine: int = 0
    """Index of its engine among these."""

    def abort(self) -> None:
        """Aborts a wait for a rank that has ended. Pipes between stages need no abort: they break
        when a rank ends.
        """
        if self.ranks is not None:
            self.ranks.abort()
        if self.engines is not None:
            self.engines.abort()


def get_rank_grid(config: EngineConfig, rank: int) -> RankGrid:
    """Returns a rank's position in its stage."""
    options = config.backend
    return RankGrid(
        rank % options.num_stage_ranks, options.tensor_parallel_size, options.expert_parallel_size
    )


def get_expert_grid(config: EngineConfig, rank: int, engine: int) -> RankGrid:
    """Returns a rank's position in its stage across all engines that share experts."""
    own = get_rank_grid(config, rank)
    return RankGrid(
        engine * own.num_ranks + own.rank,
        own.num_tensor,
        config.fleet.num_expert_engines * own.num_experts,
    )
