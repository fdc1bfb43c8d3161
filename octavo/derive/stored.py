"""Finds where a checkpoint stores each parameter of a transformers model.

transformers renames, stacks and concatenates tensors when it loads a checkpoint. Applying the
inverse of this conversion to arrays of row numbers shows which rows of which tensors each parameter
consists of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.core_model_loading import revert_weight_conversion

PARAMETER = 1 << 40
"""Factor of a parameter's index in the number of a row."""


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a parameter in one tensor of the checkpoint."""

    tensor: str
    rows: tuple[int, ...]
    """Which rows of the tensor these are."""
    total: int
    """Number of rows of the tensor."""
    transposed: bool = False
    """Whether the tensor's rows are its columns."""


class StoredTensors:
    """The tensors of a checkpoint that hold a model's parameters."""

    def __init__(self, model: Any) -> None:
        shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
        self._index = {name: index for index, name in enumerate(shapes)}
        numbers = {name: self._number(name, shape, model) for name, shape in shapes.items()}
        self._tensors: dict[str, torch.Tensor] = revert_weight_conversion(model, numbers)
        runs = sorted(
            (first, name, row)
            for name, tensor in self._tensors.items()
            if tensor.dim() < 3
            for first, row in _runs(tensor.reshape(-1))
        )
        self._stacked = {
            int(each.reshape(-1)[0]): name for name, each in self._tensors.items() if each.dim() > 2
        }
        """Tensor of all experts, by its first row."""
        self._firsts = np.array([first for first, _, _ in runs], np.int64)
        """Number of the first row of each run of consecutive numbers, in order."""
        self._runs = [(name, row) for _, name, row in runs]
        """Tensor and row at which each run starts."""

    def _number(self, name: str, shape: tuple[int, ...], model: Any) -> torch.Tensor:
        """Numbers the rows of a parameter: its first axis, or the last but one of stacked ones."""
        start = self._index[name] * PARAMETER
        if len(shape) < 2:
            return (start + torch.arange(math.prod(shape))).reshape(shape)
        if len(shape) == 2:
            return start + torch.arange(shape[0])[:, None]
        owner = model.get_submodule(name.rpartition(".")[0])
        columns = shape[-1] if getattr(owner, "is_transposed", False) else shape[-2]
        numbers = start + torch.arange(shape[0] * columns)
        if getattr(owner, "is_transposed", False):
            return numbers.reshape(shape[0], 1, columns)
        return numbers.reshape(shape[0], columns, *(1 for _ in shape[2:]))

    def parameters_in(self, tensors: Iterable[str]) -> set[str]:
        """Returns the parameters that some tensors hold parts of."""
        names = [*self._index]
        return {
            names[int(index)]
            for tensor in tensors
            for index in (self._tensors[tensor] // PARAMETER).unique()
        }

    def find(self, parameter: str, rows: Sequence[int]) -> list[Piece]:
        """Returns the tensors that hold some rows of a matrix or vector, in order."""
        numbers = self._index[parameter] * PARAMETER + np.asarray(rows, np.int64)
        runs = np.searchsorted(self._firsts, numbers, "right") - 1
        pieces: list[tuple[str, list[int]]] = []
        for run, offset in zip(runs.tolist(), (numbers - self._firsts[runs]).tolist(), strict=True):
            name, row = self._runs[run]
            if not pieces or pieces[-1][0] != name:
                pieces.append((name, []))
            pieces[-1][1].append(row + offset)
        return [Piece(name, tuple(places), self._tensors[name].numel()) for name, places in pieces]

    def find_stacked(self, parameter: str, count: int) -> str | None:
        """Returns the tensor of a parameter of `count` rows with three or more axes."""
        start = self._index[parameter] * PARAMETER
        name = self._stacked.get(start)
        whole = start + torch.arange(count)
        is_whole = name is not None and torch.equal(self._tensors[name].reshape(-1), whole)
        return name if is_whole else None

    def find_experts(
        self, parameter: str, num_experts: int, rows: Sequence[int], count: int
    ) -> list[Piece] | None:
        """Returns for each expert the tensor with some of its `count` rows, or the single tensor of
        all experts; None if the rows of an expert are in several tensors.
        """
        start = self._index[parameter] * PARAMETER
        stacked = self._stacked.get(start)
        if stacked is not None:
            tensor, whole = self._tensors[stacked], start + torch.arange(num_experts * count)
            if not torch.equal(tensor.reshape(-1), whole):
                return None
            return [Piece(stacked, tuple(rows), count, tensor.shape[-1] == count)]
        pieces = []
        for expert in range(num_experts):
            found = self.find(parameter, [expert * count + row for row in rows])
            if len(found) != 1:
                return None
            pieces += found
        return pieces


def _runs(numbers: torch.Tensor) -> list[tuple[int, int]]:
    """Returns number and index at which each run of consecutive numbers starts."""
    array = numbers.numpy()
    starts = np.flatnonzero(np.diff(array, prepend=array[:1] - 2) != 1)
    return [(int(array[start]), int(start)) for start in starts]
