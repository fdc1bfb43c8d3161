"""Collective ops of Programs split over ranks; `RANK_FORMULAS` is the dispatch table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.executor.torch.step import Made, Step
from octavo.program import rank_ops
from octavo.program.program import Op


def all_reduce(op: rank_ops.AllReduce, step: Step) -> Made:
    assert step.ranks is not None
    return (step.ranks.all_reduce(step.get(op.x)),)


def all_gather(op: rank_ops.AllGather, step: Step) -> Made:
    assert step.ranks is not None
    return (step.ranks.all_gather(step.get(op.x), op.widths),)


def collect(op: rank_ops.Collect, step: Step) -> Made:
    assert step.ranks is not None
    ids = step.get(op.ids).reshape(-1)
    firsts = torch.tensor(op.firsts, dtype=ids.dtype, device=ids.device)
    owners = torch.searchsorted(firsts, ids, right=True) - 1
    return (step.ranks.collect(step.get(op.x), owners),)


RANK_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    rank_ops.AllReduce: all_reduce,
    rank_ops.AllGather: all_gather,
    rank_ops.Collect: collect,
}
