"""Collectives between ranks, inserted by the passes `shard` and `experts`.

Shapes use the alphabet of `ops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from octavo.program.program import Op, Value


@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """Sum over ranks of the rows of a split token table; only one rank's row is not zero.

    `x [T, W]` to `out [T, W]`.
    """

    x: Value
    out: Value


@dataclass(frozen=True, slots=True)
class AllGather(Op):
    """Concatenation over ranks, before an op that reads complete rows of split columns.

    `x [T, widths[rank]]` to `out [T, sum of widths]`. Shoeybi et al. 2019 (Megatron-LM), section 3,
    but without its sums of partial products.
    """

    x: Value
    out: Value
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dispatch(Op):
    """Selects the expert rows of this rank: out[t, j] = ids[t, j] - first if first <= ids[t, j] <
    last, else -1.

    An expert matmul leaves rows of -1 undefined. With several engines (`num_engines`), t runs over
    the tokens of all engines, and the `rows` of a Route, [T*k, W], become the rows of all these
    tokens. Lepikhin et al. 2020 (GShard), section 3.2.
    """

    ids: Value
    out: Value
    first: int
    last: int
    """One past the last expert."""
    rows: Value | None = None
    outs: tuple[Value, ...] = ()
    """Expert rows of all engines' tokens; () with one engine."""
    num_engines: int = 1


@dataclass(frozen=True, slots=True)
class Collect(Op):
    """Gathers expert rows from the ranks of their experts: out[r] is row r of the rank with expert
    `ids of r`, bit for bit, so that `Combine` sums in the same order as a single process.

    With several engines, x covers the tokens of all engines, and out only this engine's tokens.
    """

    x: Value
    ids: Value
    out: Value
    num_experts: tuple[int, ...]
    """Number of experts of each rank."""
    num_engines: int = 1

    @property
    def firsts(self) -> tuple[int, ...]:
        """First expert of each rank."""
        return tuple(accumulate(self.num_experts, initial=0))[:-1]
