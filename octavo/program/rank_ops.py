"""The kinds of op by which ranks meet: sums and rows that pass between them, put into a Program by
the pass `shard`. Shapes use the alphabet of `ops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from octavo.program.program import Op, Value


@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """Sum over the ranks of their x, behind a product that is split along its inputs. `x [T, W]` to
    `out [T, W]`; the order is the same on all ranks. Shoeybi et al. 2019 (Megatron-LM), section 3.
    """

    x: Value
    out: Value


@dataclass(frozen=True, slots=True)
class AllGather(Op):
    """The ranks' x side by side, in rank order, behind a product that is split along its outputs
    and needed whole (logits). `x [T, widths[rank]]` to `out [T, sum of widths]`.
    """

    x: Value
    out: Value
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dispatch(Op):
    """Choice of the expert rows that this rank computes, those of the experts that it has: out[t,
    j] = ids[t, j] - first where first <= ids[t, j] < last, else -1. A product of experts leaves a
    row of -1 undefined. Lepikhin et al. 2020 (GShard), section 3.2.

    Where several engines have tokens of their own (`num_engines`), t counts those of all of them,
    engine by engine, and the `rows` of a Route [T*k, W] become those of all tokens.
    """

    ids: Value
    out: Value
    first: int
    last: int
    """One past the last expert."""
    rows: Value | None = None
    outs: tuple[Value, ...] = ()
    """Expert rows of all engines' tokens; () where there is one engine."""
    num_engines: int = 1


@dataclass(frozen=True, slots=True)
class Collect(Op):
    """Expert rows of all ranks, each as the rank that has its expert made it: out[r] is row r of
    the rank with expert `ids of r`, bit for bit, so that `Combine` sums in the order of one
    process. Where x is of several engines' tokens, out has the rows of this engine's own.
    """

    x: Value
    ids: Value
    out: Value
    num_experts: tuple[int, ...]
    """Experts of each rank, in the order of the experts."""
    num_engines: int = 1

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first expert of each rank."""
        return tuple(accumulate(self.num_experts, initial=0))[:-1]


HOST_OPS: tuple[type[Op], ...] = (AllReduce, AllGather, Collect)
"""Ops that end a segment: the host acts between what stands before and after them."""
