"""The weights of a Program: parameters of the graph, and the checkpoint tensors that contain
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from octavo.derive.capture import Captured, ExpertModule, reject
from octavo.derive.graph import SAME, TracedGraph, name_of
from octavo.program.program import Weight


@dataclass(frozen=True)
class Matrix:
    """A parameter `[outputs, inputs]`, or `[inputs, outputs]` if `transposed`."""

    name: str
    outputs: int
    inputs: int
    transposed: bool


class Weights:
    """Finds the weights of nodes."""

    def __init__(self, captured: Captured, graph: TracedGraph, model_type: str) -> None:
        self._captured = captured
        self._graph = graph
        self._model_type = model_type

    def matrix(self, node: Any, *, swapped: bool = False) -> Matrix | None:
        """Returns the matrix that a node is, possibly transposed; None if it is not a 2D parameter.
        `swapped`: the matrix is used as `[in, out]`.
        """
        transposed = swapped
        while isinstance(node, Node):
            name = self._graph.parameter(node)
            if name is not None:
                shape = self._captured.shapes[name]
                if len(shape) != 2:
                    return None
                return Matrix(name, *(shape[::-1] if transposed else shape), transposed)
            if name_of(node) in ("aten.t", "aten.transpose"):
                transposed = not transposed
            elif name_of(node) not in SAME:
                return None
            node = node.args[0]
        return None

    def vector(self, node: Any) -> str | None:
        """Returns the name of the parameter that a node is; None if it is none."""
        while isinstance(node, Node) and node.op == "call_function" and name_of(node) in SAME:
            node = node.args[0]
        return self._graph.parameter(node) if isinstance(node, Node) else None

    def whole(self, name: str) -> Weight:
        """Returns a complete parameter, which the checkpoint stores in one tensor; a single number
        as a vector.
        """
        shape = self._captured.shapes[name] or (1,)
        pieces = self._captured.stored.find(name, range(shape[0]))
        if len(pieces) != 1 or pieces[0].rows != (*range(pieces[0].total),):
            raise reject(self._model_type, f"{name} is put together from several tensors")
        sources = () if self._captured.shapes[name] else (pieces[0].tensor,)
        return Weight(pieces[0].tensor, shape, sources)

    def stacked(self, name: str) -> str:
        """Returns the checkpoint's tensor of a parameter with three or more axes."""
        found = self._captured.stored.find_stacked(name, self._captured.shapes[name][0])
        if found is None:
            raise reject(self._model_type, f"{name} is stored in another way")
        return found

    def rows_of(self, matrix: Matrix, rows: Sequence[int]) -> tuple[Weight, ...]:
        """Returns the checkpoint's tensors of some rows of a matrix."""
        if matrix.transposed:
            (piece,) = self._captured.stored.find(matrix.name, range(matrix.inputs))
            return (self._cut(piece.tensor, rows, matrix.outputs, matrix.inputs, transposed=True),)
        return tuple(
            self._cut(piece.tensor, piece.rows, piece.total, matrix.inputs)
            for piece in self._captured.stored.find(matrix.name, rows)
        )

    def biases(
        self, name: str, rows: Sequence[int], weights: Sequence[Weight]
    ) -> tuple[Weight, ...]:
        pieces = self._captured.stored.find(name, rows)
        if [len(piece.rows) for piece in pieces] != [weight.shape[0] for weight in weights]:
            raise reject(self._model_type, f"{name} is stored otherwise than its matrix")
        return tuple(self._cut(piece.tensor, piece.rows, piece.total) for piece in pieces)

    def expert_width(self, experts: ExpertModule) -> int:
        """Returns the inner width of an expert."""
        shape = self._captured.shapes[f"{experts.module}.down_proj"]
        return shape[-2] if experts.is_transposed else shape[-1]

    def expert_rows(  # identifies a weight by module, name and shape
        self, experts: ExpertModule, name: str, rows: Sequence[int], inputs: int, num_experts: int
    ) -> tuple[Weight, Weight | None]:
        """Returns some rows of every expert's matrix, and of its bias."""
        parameter = f"{experts.module}.{name}"
        shape = self._captured.shapes[parameter]
        count = shape[-1] if experts.is_transposed else shape[-2]
        pieces = self._captured.stored.find_experts(parameter, num_experts, rows, count)
        if pieces is None or len({(piece.rows, piece.total) for piece in pieces}) != 1:
            raise reject(self._model_type, f"{parameter} is stored in another way")
        first = pieces[0]
        weight = self._cut(
            first.tensor if len(pieces) == 1 else f"{parameter}.{rows[0]}",
            first.rows,
            first.total,
            inputs,
            transposed=first.transposed,
            experts=tuple(piece.tensor for piece in pieces) if len(pieces) > 1 else num_experts,
        )
        if not experts.has_bias:
            return weight, None
        bias = self._cut(f"{parameter}_bias", rows, count, experts=num_experts)
        return weight, replace(bias, rows_last=True)

    def _cut(
        self,
        name: str,
        rows: Sequence[int],
        total: int,
        *inputs: int,
        transposed: bool = False,
        experts: tuple[str, ...] | int = (),
    ) -> Weight:
        """Returns some rows of a tensor, or of the tensors of all experts."""
        pattern = find_pattern(rows)
        if pattern is None:
            raise reject(self._model_type, f"some rows of {name} are read in another order")
        whole = [*rows] == [*range(total)]
        count = (len(experts),) if isinstance(experts, tuple) and experts else ()
        if isinstance(experts, int):
            count, experts = (experts,), ()
        cut = () if whole else (total, *pattern)
        return Weight(name, (*count, len(rows), *inputs), experts, transposed, *cut)


def find_pattern(columns: Sequence[int]) -> tuple[int, int, int] | None:
    """Returns start, step and run of columns start + (i // run) * step + i % run; None if they are
    in another order.
    """
    start = columns[0]
    run = next((i for i in range(1, len(columns)) if columns[i] != start + i), len(columns))
    step = columns[run] - start if run < len(columns) else run
    wanted = [start + i // run * step + i % run for i in range(len(columns))]
    return (start, step, run) if wanted == [*columns] and step > 0 else None
