"""The places of the ranks that share out one model's layers: by heads and widths, and by experts.

Rank r has the tensor place r % num_tensor and the expert place r // num_tensor. A collective is met
by all ranks, since all compute the same ops; each reads the parts of its own row or column.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.program import rank_ops
from octavo.program.program import Op


@dataclass(frozen=True, slots=True)
class RankGrid:
    """One rank's place among `num_tensor * num_experts`."""

    rank: int = 0
    num_tensor: int = 1
    """Ranks that share out heads and widths."""
    num_experts: int = 1
    """Groups of such ranks that share out the experts."""

    @property
    def num_ranks(self) -> int:
        return self.num_tensor * self.num_experts

    @property
    def tensor_place(self) -> int:
        return self.rank % self.num_tensor

    @property
    def expert_place(self) -> int:
        return self.rank // self.num_tensor

    @property
    def tensor_ranks(self) -> range:
        """The ranks that share out the heads and widths of this one's experts, itself too."""
        first = self.rank - self.tensor_place
        return range(first, first + self.num_tensor)

    @property
    def expert_ranks(self) -> range:
        """The ranks that have the same share of the heads and widths, in the order of their
        experts, itself too.
        """
        return range(self.tensor_place, self.num_ranks, self.num_tensor)


ALONE = RankGrid()
"""The place of the only rank."""


def misplaced(op: Op, grid: RankGrid) -> str | None:
    """Says what keeps a collective op from being one of these ranks'; None where nothing does."""
    if isinstance(op, rank_ops.AllGather) and len(op.widths) != grid.num_tensor:
        return f"AllGather over {len(op.widths)} ranks on one of {grid.num_tensor}"
    if isinstance(op, rank_ops.AllReduce) and grid.num_tensor == 1:
        return "the op AllReduce on one rank"
    if isinstance(op, rank_ops.Collect) and len(op.num_experts) != grid.num_experts:
        return f"Collect over {len(op.num_experts)} ranks on one of {grid.num_experts}"
    return None
