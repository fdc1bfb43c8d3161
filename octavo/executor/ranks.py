"""The port through which the ranks of one engine meet, whatever carries their numbers.

Every rank comes to the same collectives in the same order. Sums are in fp32 and added in rank
order, so that every transport gives the same bits.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from octavo.executor.rank_grid import RankGrid

Array = TypeVar("Array")


class Abortable(Protocol):
    """A connection among processes that can be given up."""

    def abort(self) -> None:
        """Ends a wait for a dead process, with an error; called from any thread."""
        ...


class Ranks(Protocol[Array]):
    """One process's place among the ranks, and its connection to the others."""

    @property
    def rank(self) -> int:
        """Place of this process among the ranks; the first one draws."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        ...

    @property
    def grid(self) -> RankGrid:
        """Place of this process among those that share out heads and among those of experts."""
        ...

    def all_reduce(self, x: Array) -> Array:
        """Returns the sum of the x of its `grid.tensor_ranks`, added in rank order in fp32."""
        ...

    def all_gather(self, x: Array, widths: tuple[int, ...]) -> Array:
        """Joins the columns of its `grid.tensor_ranks`: `x [T, widths[place]]` to `[T, sum of
        widths]`.
        """
        ...

    def collect(self, x: Array, owners: Array) -> Array:
        """Returns each row of `x [R, W]` as the one of its `grid.expert_ranks` has it whose place
        `owners [R]` names.
        """
        ...

    def from_first(self, x: Array) -> Array:
        """Returns the first rank's x, which replaces the contents of x on the other ranks."""
        ...

    def abort(self) -> None:
        """Ends a collective that waits for a dead rank, with an error; called from any thread."""
        ...


class Meeting(Protocol):
    """A place at which ranks find each other, made by the first one before it starts the others."""

    def address_of(self, rank: int) -> list[int]:
        """Returns the numbers by which a rank joins: a port, or descriptors."""
        ...

    def inherited_by(self, rank: int) -> tuple[int, ...]:
        """Returns the descriptors that a rank's process inherits."""
        ...
