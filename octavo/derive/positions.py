"""Identifies the rows of a table of positions or segments that a graph reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from octavo.derive.graph import TracedGraph


@dataclass(frozen=True)
class TableRows:
    """Rows position + `first` of a table, or always row `first`."""

    first: int
    is_constant: bool


def find_rows(graph: TracedGraph, indices: Node) -> TableRows | None:
    """Returns the rows that `indices` name; None if they depend on the tokens or follow another
    rule.

    Padding tokens are not tried: models that do not count them read another row for them.
    """
    if indices in graph.values:
        return _rows_of([graph.values[indices]], [graph.far_values[indices]], graph.far_position)
    assert graph.ids is not None
    generator = torch.Generator().manual_seed(0)
    near: list[Any] = []
    far: list[Any] = []
    for highest in (3, 100, 1 << 20):
        tokens = torch.randint(0, highest, graph.shape(graph.ids), generator=generator)
        if graph.captured.padding is not None:
            tokens[tokens == graph.captured.padding] = graph.captured.padding + 1
        near.append(graph.run(indices, {graph.ids: tokens}, {}))
        far.append(graph.run(indices, {graph.ids: tokens}, {}, is_far=True))
    return _rows_of(near, far, graph.far_position)


def _rows_of(near: list[Any], far: list[Any], distance: int) -> TableRows | None:
    indices = near[0].reshape(-1)
    first = int(indices[0])
    if not all(torch.equal(each.reshape(-1), indices) for each in near):
        return None
    shifts = [each.reshape(-1) - indices for each in far]
    if bool((indices == first).all()) and all(bool((shift == 0).all()) for shift in shifts):
        return TableRows(first, True)
    if not torch.equal(indices, torch.arange(first, first + len(indices))):
        return None
    # A slice of a table of positions begins at its first row wherever the text does.
    steady = all(bool(((shift == distance) | (shift == 0)).all()) for shift in shifts)
    return TableRows(first, False) if steady else None
