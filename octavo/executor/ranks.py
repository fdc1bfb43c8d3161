"""Interface of the collectives among the ranks of one engine, independent of the transport.

Every rank calls the same collectives in the same order. Sums are in fp32 and added in rank order,
so every transport gives the same bits.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from octavo.executor.rank_grid import RankGrid

Array = TypeVar("Array")


class Abortable(Protocol):
    """A connection among processes that can be aborted."""

    def abort(self) -> None:
        """Ends a wait for a dead process, with an error; called from any thread."""
        ...


class Ranks(Protocol[Array]):
    """One process among the ranks, and its connection to the others."""

    @property
    def rank(self) -> int:
        """Index of this process among the ranks; the first one samples."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        ...

    @property
    def grid(self) -> RankGrid:
        """Tensor-parallel and expert-parallel groups of this process."""
        ...

    def all_reduce(self, x: Array) -> Array:
        """Returns the sum of x over the rank's `grid.tensor_ranks`, added in rank order in fp32."""
        ...

    def all_gather(self, x: Array, widths: tuple[int, ...]) -> Array:
        """Concatenates columns over the rank's `grid.tensor_ranks`: rank i contributes `x [T,
        widths[i]]`, the result is `[T, sum of widths]`.
        """
        ...

    def collect(self, x: Array, owners: Array) -> Array:
        """Returns each row of `x [R, W]` from its owner: `owners [R]` are indices into the rank's
        `grid.expert_ranks`.
        """
        ...

    def from_first(self, x: Array) -> Array:
        """Broadcasts the first rank's x, in place."""
        ...

    def abort(self) -> None:
        """Ends a collective that waits for a dead rank, with an error; called from any thread."""
        ...


class RankRendezvous(Protocol):
    """How ranks find each other, made by the first one before it starts the others."""

    def get_address(self, rank: int) -> list[int]:
        """Returns the address that a rank uses to join: a port, or file descriptors."""
        ...

    def get_inherited(self, rank: int) -> tuple[int, ...]:
        """Returns the file descriptors that a rank's process inherits."""
        ...
