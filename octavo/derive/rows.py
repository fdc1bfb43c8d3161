"""Row maps: for each element of a tensor, the column and Value that it comes from.

A tensor that only moves elements (views, transpositions, slices, concatenations) keeps an index per
element instead of an op.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import torch

from octavo.program.program import Value

TOKEN = 1 << 40
"""Factor of the token index in an element's number."""


@dataclass(frozen=True)
class RowMap:
    """A tensor whose elements are columns of Values, one row per token."""

    columns: torch.Tensor
    """Global column of each element; the tensor's shape without the token axis."""
    axis: int
    """Token axis."""
    num_tokens: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.columns.shape)
        shape.insert(self.axis, self.num_tokens)
        return tuple(shape)

    def numbers(self) -> torch.Tensor:
        """Returns a number for each element: token * TOKEN + column."""
        tokens = torch.arange(self.num_tokens)
        shape = [1] * (self.columns.dim() + 1)
        shape[self.axis] = self.num_tokens
        return self.columns.unsqueeze(self.axis) + tokens.reshape(shape) * TOKEN

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """Arranges `values [T, W]`, whose columns are in the order of this tensor's elements, in
        this tensor's shape.
        """
        arranged = values.reshape(self.num_tokens, *self.columns.shape)
        return arranged.movedim(0, self.axis)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of this shape as `[T, W]`."""
        return tensor.movedim(self.axis, 0).reshape(self.num_tokens, -1)


def rows_of(numbers: Any, num_tokens: int) -> RowMap | None:
    """Returns the row map that corresponds to moved element numbers; None if there is none."""
    if not isinstance(numbers, torch.Tensor) or numbers.dtype != torch.int64:
        return None
    tokens, columns = numbers // TOKEN, numbers % TOKEN
    for axis, size in enumerate(numbers.shape):
        if size != num_tokens:
            continue
        shape = [1] * numbers.dim()
        shape[axis] = num_tokens
        first = columns.select(axis, 0)
        if bool((tokens == torch.arange(num_tokens).reshape(shape)).all()) and bool(
            (columns == first.unsqueeze(axis)).all()
        ):
            return RowMap(first, axis, num_tokens)
    return None


class Columns:
    """Numbers the columns of Values."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: list[Value] = []
        self._next = 0

    def add(self, value: Value) -> int:
        start = self._next
        self._starts.append(start)
        self._values.append(value)
        self._next += value.width
        return start

    def rows(self, value: Value, shape: tuple[int, ...], axis: int, num_tokens: int) -> RowMap:
        """Returns the map of a new Value whose columns are a tensor's elements in order."""
        start = self.add(value)
        columns = torch.arange(start, start + value.width)
        return RowMap(columns.reshape(shape[:axis] + shape[axis + 1 :]), axis, num_tokens)

    def sources(self, rows: RowMap) -> list[tuple[Value, list[int]]]:
        """Returns the Values of a tensor in order, each with its columns."""
        found: list[tuple[Value, list[int]]] = []
        for column in rows.columns.reshape(-1).tolist():
            index = bisect.bisect_right(self._starts, column) - 1
            value = self._values[index]
            if not found or found[-1][0] is not value:
                found.append((value, []))
            found[-1][1].append(column - self._starts[index])
        return found
