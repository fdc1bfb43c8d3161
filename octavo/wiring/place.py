"""The place of one process among those that compute one model.

Ranks are numbered stage by stage, the last stage's first, so that rank 0 draws; within a stage as
`RankGrid` numbers them. A rank meets the others of its stage within a step, and hands its hidden
states to the rank at its own place in the stage behind.
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
class RankPlace:
    """A process's rank, and its connections to the others. Implements `ranks.Abortable`."""

    rank: int = 0
    ranks: Ranks[Any] | None = None
    """The ranks of its stage; None where there is one."""
    link: StageLink | None = None
    """The stages before and behind; None where there is one stage."""
    engines: EngineRanks | None = None
    """The ranks of its stage in all engines that share their experts; None where none do."""
    engine: int = 0
    """Number of its engine among these."""

    def abort(self) -> None:
        """Ends a wait for a rank that has ended; the pipe of a stage breaks by itself."""
        if self.ranks is not None:
            self.ranks.abort()
        if self.engines is not None:
            self.engines.abort()


def grid_of(config: EngineConfig, rank: int) -> RankGrid:
    """Returns the place of a rank among those of its stage."""
    options = config.backend
    return RankGrid(
        rank % options.num_stage_ranks, options.tensor_parallel_size, options.expert_parallel_size
    )


def grid_among_engines(config: EngineConfig, rank: int, engine: int) -> RankGrid:
    """Returns the place of an engine's rank among those of its stage in all engines that share
    their experts.
    """
    own = grid_of(config, rank)
    return RankGrid(
        engine * own.num_ranks + own.rank,
        own.num_tensor,
        config.fleet.num_sharing * own.num_experts,
    )
