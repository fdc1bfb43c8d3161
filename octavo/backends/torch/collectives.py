"""The collective ops of a Program that is split over several ranks; `RANK_FORMULAS` is the dispatch
table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.backends.torch.step import Made, Step
from octavo.program import ops
from octavo.program.program import Op


def all_reduce(op: ops.AllReduce, step: Step) -> Made:
    assert step.ranks is not None
    return (step.ranks.all_reduce(step.get(op.x)),)


def all_gather(op: ops.AllGather, step: Step) -> Made:
    assert step.ranks is not None
    return (step.ranks.all_gather(step.get(op.x), op.widths),)


RANK_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ops.AllReduce: all_reduce,
    ops.AllGather: all_gather,
}
