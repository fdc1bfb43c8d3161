"""Tensor-parallel and expert-parallel groups of the ranks of one model.

Rank r has the tensor index r % num_tensor and the expert index r // num_tensor. All ranks take part
in every collective, since all compute the same ops, but each reads only its own group's parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.program import rank_ops
from octavo.program.program import Op


@dataclass(frozen=True, slots=True)
class RankGrid:
    """One rank among `num_tensor * num_experts`."""

    rank: int = 0
    num_tensor: int = 1
    """Size of a tensor-parallel group."""
    num_experts: int = 1
    """Size of an expert-parallel group."""

    @property
    def num_ranks(self) -> int:
        return self.num_tensor * self.num_experts

    @property
    def tensor_index(self) -> int:
        return self.rank % self.num_tensor

    @property
    def expert_index(self) -> int:
        return self.rank // self.num_tensor

    @property
    def tensor_ranks(self) -> range:
        """This rank's tensor-parallel group."""
        first = self.rank - self.tensor_index
        return range(first, first + self.num_tensor)

    @property
    def expert_ranks(self) -> range:
        """This rank's expert-parallel group."""
        return range(self.tensor_index, self.num_ranks, self.num_tensor)


ALONE = RankGrid()
"""Grid of an engine with one rank."""


def misplaced(op: Op, grid: RankGrid) -> str | None:
    """Returns why a collective op does not fit these ranks; None if it does."""
    if isinstance(op, rank_ops.AllGather) and len(op.widths) != grid.num_tensor:
        return f"AllGather over {len(op.widths)} ranks on one of {grid.num_tensor}"
    if isinstance(op, rank_ops.AllReduce) and grid.num_tensor == 1:
        return "the op AllReduce on one rank"
    if isinstance(op, rank_ops.Collect) and len(op.num_experts) != grid.num_experts:
        return f"Collect over {len(op.num_experts)} ranks on one of {grid.num_experts}"
    return None
