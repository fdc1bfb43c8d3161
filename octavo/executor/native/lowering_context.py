"""State shared by the lowering of all ops: the plan builder and the arena offset of each Value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.native.check import ACTIVATIONS
from octavo.executor.native.extension import native_module
from octavo.executor.native.stages import get_stages, plan_arena
from octavo.executor.native.weights import NativeWeights
from octavo.program import ops
from octavo.program.low_rank import Site
from octavo.program.program import Op, Program, Value, Weight

GROUP = 32
"""Inputs per activation scale (csrc/kernels/weights.h)."""

WHOLE_ROWS = ("whole", "outliers")
"""Activation types with one scale per row. A row can be quantized only after all of it has been
computed.
"""

Span = tuple[str, int, int]
"""(axis, offset, width) of a Value, as the bindings expect it."""

HEAD = "samples"
"""Axis of the LM head's rows: sampled rows, or requests if those are pooled."""


def cut_span(span: Span, column: int, width: int) -> Span:
    """Returns `width` columns of a span, starting at `column`."""
    axis, offset, _ = span
    return (axis, offset + column, width)


class LoweringContext:
    """Plan builder and lookups shared by the lowering of a Program's ops."""

    def __init__(
        self,
        program: Program,
        builder: Any,
        weights: NativeWeights,
        get_chunk: Callable[[Op], int | None],
    ) -> None:
        """`get_chunk` returns the streamed weight chunk that a matmul waits for."""
        self.program, self.builder, self.weights = program, builder, weights
        self.get_chunk = get_chunk
        self.native = native_module()
        """The compiled extension, which defines the op specs."""
        self.before: Op | None = None
        """The op before the one being lowered."""
        self.num_readers = Counter(value for op in program.ops for value in op.inputs)
        """Number of ops and outputs that read each Value."""
        self.num_readers.update(program.outputs.values())
        self.sites: list[Site] = []
        """Adapter sites of the Program, in builder order."""
        self._locations = plan_arena(program, get_stages(program)).locations

    def add_sites(self, sites: Iterable[Site]) -> list[int]:
        """Adds sites; returns their indices."""
        first = len(self.sites)
        self.sites += sites
        return list(range(first, len(self.sites)))

    def span(self, value: Value) -> Span:
        location = self._locations[value.name]
        return (
            HEAD if location.axis == "requests" else location.axis,
            location.offset,
            location.width,
        )

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
        """Returns the norm of a matmul's input, permuted by `order`."""
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
        """Returns a norm with weights permuted by `order`."""
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
