"""The state that the lowering of every op shares: the executor's builder, the plan of its memory,
and the stage that is open.

Opens stages and says where Values lie; knows no op. What kernels cannot do check.py has refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.executor.native.stages import Stage, plan_arena, stages_of
from octavo.program import family_ops, ops
from octavo.program.low_rank import Site
from octavo.program.passes.plan import Plan
from octavo.program.program import Op, Program, Value, Weight

GROUP = 32
"""Inputs that share an activation scale (csrc/kernels/table.h)."""

WHOLE_ROWS = ("whole", "outliers")
"""Types of rows with one scale, which cannot be converted before all of a row is there."""

Span = tuple[str, int, int]
"""(axis, offset, width): a Place as the bindings take it."""

HEAD = "samples"
"""The executor's axis of the rows that its head is over: sampled rows, or requests where these are
pooled.
"""


class Weights(Protocol):
    """The source of an op's weights, as tiles (NativeTiles) or as floats."""

    def tiles(self, weight: Weight) -> Any: ...
    def table(self, weight: Weight) -> Any: ...
    def gate_and_up(self, gate: Weight, up: Weight) -> list[Any]: ...
    def experts(self, weight: Weight) -> list[Any]: ...
    def heads(self, op: ops.HeadLinear) -> list[Any]: ...
    def place_table(self, op: family_ops.PlaceScores) -> list[Any]: ...
    def experts_gate_and_up(self, gate: Weight, up: Weight) -> tuple[list[Any], list[Any]]: ...
    def floats(self, weight: Weight) -> NDArray[np.float32]: ...


class StageEmitter:
    """Opens the stages of a Program on the executor's builder, one after the other."""

    def __init__(
        self,
        program: Program,
        builder: Any,
        weights: Weights,
        chunk_of: Callable[[Op], int | None],
    ) -> None:
        """`chunk_of` names the streamed chunk of weights that a product waits for."""
        self.program, self.builder, self.weights = program, builder, weights
        self._chunk_of = chunk_of
        self.stages = stages_of(program)
        self.plan: Plan = plan_arena(program, self.stages)
        self.stage = self.stages[0]
        """The stage whose ops are lowered."""
        self.open_rows: Stage | None = None
        """The stage that takes row ops on the builder; None: the last one opened takes none."""
        self.before: Op | None = None
        """The op before the one that is lowered."""
        self.num_readers = Counter(value for op in program.ops for value in op.inputs)
        """Number of ops and outputs that read a Value."""
        self.num_readers.update(program.outputs.values())
        self.sites: list[Site] = []
        """The Program's sites, in the executor's order."""

    def begin(self) -> None:
        """Opens a stage for an op that is not row-local."""
        self.builder.begin_stage(_executor_axis(self.stage.axis), self.stage.range)
        self.open_rows = None

    def begin_rows(self) -> None:
        """Opens a stage of row ops."""
        self.begin()
        self.open_rows = self.stage

    def await_weights(self, op: Op) -> None:
        """Lets the next product wait for its weights where they are streamed."""
        chunk = self._chunk_of(op)
        if chunk is not None:
            self.builder.await_chunk(chunk)

    def span(self, value: Value) -> Span:
        """Returns where a Value lies."""
        place = self.plan.places[value.name]
        return (_executor_axis(place.axis), place.offset, place.width)

    def norm(
        self, norm: ops.PreNorm | None, permutation: NDArray[np.int32] | None = None
    ) -> tuple[Any, ...] | None:
        """Returns the norm of a product's rows, its numbers in the order of a permutation."""
        if norm is None:
            return None
        weight, bias = self.weights.floats(norm.weight), self.optional(norm.bias)
        if permutation is not None:
            weight, bias = weight[permutation], None if bias is None else bias[permutation]
        return (weight, bias, norm.eps, norm.weight_offset, norm.centered)

    def optional(self, weight: Weight | None) -> NDArray[np.float32] | None:
        """Returns a weight's numbers; None without one."""
        return None if weight is None else self.weights.floats(weight)


def _executor_axis(axis: str) -> str:
    return HEAD if axis == "requests" else axis
