"""State shared by the lowering of all ops: the plan builder, and the place of each Value.

`check.py` has rejected Programs that the kernels cannot run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.executor.native.check import ACTIVATIONS
from octavo.executor.native.extension import native_module
from octavo.executor.native.stages import plan_arena, stages_of
from octavo.program import family_ops, ops
from octavo.program.low_rank import Site
from octavo.program.program import Op, Program, Value, Weight

GROUP = 32
"""Inputs that share an activation scale (csrc/kernels/table.h)."""

WHOLE_ROWS = ("whole", "outliers")
"""Types of rows with one scale, which cannot be converted before all of a row is there."""

Span = tuple[str, int, int]
"""(axis, offset, width): a Place as the bindings take it."""

HEAD = "samples"
"""The axis of the rows that the head is over: sampled rows, or requests where these are pooled."""


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


class LoweringContext:
    """The builder of a Program's plan, and what the lowering of its ops knows of the Program."""

    def __init__(
        self,
        program: Program,
        builder: Any,
        weights: Weights,
        chunk_of: Callable[[Op], int | None],
    ) -> None:
        """`chunk_of` names the streamed chunk of weights that a product waits for."""
        self.program, self.builder, self.weights = program, builder, weights
        self.chunk_of = chunk_of
        self.native = native_module()
        """The extension, which has the specs of ops."""
        self.before: Op | None = None
        """The op before the one that is lowered."""
        self.num_readers = Counter(value for op in program.ops for value in op.inputs)
        """Number of ops and outputs that read a Value."""
        self.num_readers.update(program.outputs.values())
        self.sites: list[Site] = []
        """The Program's sites, in the builder's order."""
        self._places = plan_arena(program, stages_of(program)).places

    def add_sites(self, sites: Iterable[Site]) -> list[int]:
        """Adds sites; returns their numbers."""
        first = len(self.sites)
        self.sites += sites
        return list(range(first, len(self.sites)))

    def span(self, value: Value) -> Span:
        """Returns where a Value lies."""
        place = self._places[value.name]
        return (HEAD if place.axis == "requests" else place.axis, place.offset, place.width)

    def span_or_none(self, value: Value | None) -> Span | None:
        return None if value is None else self.span(value)

    def floats_or_none(self, weight: Weight | None) -> NDArray[np.float32] | None:
        return None if weight is None else self.weights.floats(weight)

    def gate_spec(self, gate: ops.Gate | None) -> Any:
        if gate is None:
            return None
        return self.native.GateSpec(
            activation=ACTIVATIONS.index(gate.activation),
            clamp=gate.clamp,
            alpha=gate.alpha,
            up_offset=gate.up_offset,
            threshold=gate.threshold,
        )

    def input_norm(self, norm: ops.PreNorm | None, order: NDArray[np.int32] | None = None) -> Any:
        """Returns the norm of a product's rows, its numbers in an order."""
        if norm is None:
            return None
        return self.norm_spec(
            norm.weight,
            norm.bias,
            eps=norm.eps,
            weight_offset=norm.weight_offset,
            centered=norm.centered,
            order=order,
        )

    def norm_spec(
        self,
        weight: Weight,
        bias: Weight | None,
        *,
        eps: float,
        weight_offset: float,
        centered: bool,
        order: NDArray[np.int32] | None = None,
    ) -> Any:
        """Returns a norm whose numbers lie in an order."""
        numbers, biases = self.weights.floats(weight), self.floats_or_none(bias)
        if order is not None:
            numbers, biases = numbers[order], None if biases is None else biases[order]
        return self.native.NormSpec(
            weight=numbers,
            bias=biases,
            eps=eps,
            weight_offset=weight_offset,
            is_layer_norm=centered,
        )
