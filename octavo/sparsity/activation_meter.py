"""Measures the distribution of a model's activations from the inputs that a backend records.

Activations are counted by the upper bits of their magnitude (64 bins per power of two), so memory
is independent of the text's length. `calibrate.py` runs the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.executor.base import ObservedInputs
from octavo.executor.reference.ops import gated
from octavo.program.ops import Act, ActMul, Linear
from octavo.program.program import Program, Value, Weight
from octavo.sparsity.activation_curves import LEVELS, USED_SHARE, ActivationCurve, NeuronUse
from octavo.sparsity.passes.skip_zeros import ZEROING
from octavo.sparsity.passes.sparsify import get_gate_name

Floats = NDArray[np.float32]

DROPPED_BITS = 17
"""Low bits of an fp32 number that the histogram ignores."""

NUM_CLASSES = 1 << (31 - DROPPED_BITS)


@dataclass(slots=True)
class Magnitudes:
    """Histogram of activation magnitudes."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_CLASSES, np.int64))
    powers: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_CLASSES))
    """Contribution of each bin to the power of the matmul's output."""

    def add(self, numbers: Floats, gains: NDArray[np.float64]) -> None:
        """Adds activations `[T, N]`; column n is multiplied by weights of power `gains[n]`."""
        magnitudes = np.ascontiguousarray(np.abs(numbers), np.float32)
        classes = (magnitudes.view(np.uint32) >> DROPPED_BITS).reshape(-1)
        powers = np.square(magnitudes, dtype=np.float64) * gains
        self.counts += np.bincount(classes, minlength=NUM_CLASSES)[:NUM_CLASSES]
        self.powers += np.bincount(classes, powers.reshape(-1), NUM_CLASSES)[:NUM_CLASSES]

    def curve(self, weights: list[str], size: int) -> ActivationCurve:
        """Returns thresholds (upper bin edges) and losses for LEVELS."""
        below, lost = np.cumsum(self.counts), np.cumsum(self.powers)
        bins = np.searchsorted(below, np.array(LEVELS) * below[-1])
        ends = ((bins + 1).astype(np.uint32) << DROPPED_BITS).view(np.float32)
        losses = lost[bins] / max(float(lost[-1]), 1e-30)
        return ActivationCurve(weights, size, ends.tolist(), losses.tolist())


@dataclass(frozen=True, slots=True)
class MeasuredGate:
    """An ActMul and the matmul that computes its gate."""

    op: ActMul
    maker: Linear
    first: int
    """First output of the matmul that belongs to the gate."""
    last: Weight | None
    """The single matrix that reads the gated output; None if there are others."""

    def projection(self, floats: Callable[[Weight], Floats]) -> tuple[Floats, Floats]:
        """Returns the matrix `[gates, in]` and the bias `[gates]` that compute the gate."""
        part = slice(self.first, self.first + self.op.gate.width)
        weights = self.maker.weights_
        biases = self.maker.biases or (None,) * len(weights)
        whole = [
            np.zeros(weight.shape[0], np.float32) if bias is None else floats(bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        matrix = np.concatenate([floats(weight) for weight in weights])
        return matrix[part], np.concatenate(whole)[part]


class ActivationMeter:
    """Accumulates statistics of a Program's matmul inputs, one step at a time."""

    def __init__(
        self, program: Program, observed: ObservedInputs, floats: Callable[[Weight], Floats]
    ) -> None:
        """`floats` reads a weight as fp32, `[out, in]`."""
        self._observed = observed.inputs
        self._floats = floats
        self._products = _by_input(program, self._observed)
        self._gates = measured_gates(program, self._observed)
        self._gains = {
            value: sum(
                np.square(floats(weight), dtype=np.float64).sum(axis=0) for weight in weights
            )
            for value, weights in self._products.items()
        }
        self._inputs = {value: Magnitudes() for value in self._products}
        self._opened = {name: Magnitudes() for name in self._gates}
        self._zeroed = _zeroed(program, self._observed)
        lasts = [gate.last for gate in self._gates.values() if gate.last is not None]
        self._used = {
            weight.name: np.zeros(weight.shape[1], np.int64) for weight in (*self._zeroed, *lasts)
        }

    def take(self, num_rows: int) -> None:
        """Adds the first `num_rows` rows that the last step recorded."""
        for value, weights in self._products.items():
            numbers = self._observed[weights[0]][:num_rows]
            self._inputs[value].add(numbers, self._gains[value])
        for name, gate in self._gates.items():
            opened = self._open(gate, num_rows)
            self._opened[name].add(opened, np.ones(opened.shape[1]))
            if gate.last is not None and gate.last not in self._zeroed:
                self._used[gate.last.name] += _widest(opened)
        for weight in self._zeroed:
            self._used[weight.name] += np.count_nonzero(self._observed[weight][:num_rows], axis=0)

    def strongest(self, num_rows: int, share: float) -> list[NDArray[np.int64]]:
        """Returns for each gate the indices of the neurons with the largest |f(gate)| in each row
        of the last step, `[num_rows, share * neurons]`, sorted.
        """
        neurons = []
        for gate in self._gates.values():
            opened = np.abs(self._open(gate, num_rows))
            count = max(1, round(share * opened.shape[1]))
            widest = np.argpartition(-opened, count - 1, axis=1)[:, :count]
            neurons.append(np.sort(widest, axis=1))
        return neurons

    def inputs(self) -> list[ActivationCurve]:
        """Returns the curves of matmul inputs, in the Program's order."""
        return [
            self._inputs[value].curve(
                [weight.name for weight in weights],
                sum(weight.shape[0] * weight.shape[1] for weight in weights),
            )
            for value, weights in self._products.items()
        ]

    def gates(self) -> list[ActivationCurve]:
        return [
            self._opened[name].curve([name], gate.op.out.width * gate.maker.x.width)
            for name, gate in self._gates.items()
        ]

    def neurons(self) -> list[NeuronUse]:
        """Returns how often each layer's neurons were used.

        A neuron counts as used if its activation is not zero or, if the activation function
        produces no zeros, if its gate is among the largest.
        """
        return [NeuronUse(name, counts.tolist()) for name, counts in self._used.items()]

    def _open(self, gate: MeasuredGate, num_rows: int) -> Floats:
        """Computes f(gate) for the last step's rows."""
        rows = self._observed[gate.maker.weights_[0]][:num_rows]
        matrix, bias = gate.projection(self._floats)
        products = rows @ matrix.T + bias
        ones = np.full(products.shape, 1.0 - gate.op.up_offset)
        opened: Floats = gated(products.astype(np.float64), ones, gate.op).astype(np.float32)
        return opened


def _by_input(program: Program, observed: Mapping[Weight, Floats]) -> dict[Value, list[Weight]]:
    """Returns the matrices that multiply each recorded input, in the Program's order."""
    weights_by_input: dict[Value, list[Weight]] = {}
    for op in program.ops:
        if (
            isinstance(op, Linear)
            and op.x.axis == "tokens"
            and all(weight in observed for weight in op.weights_)
        ):
            weights_by_input.setdefault(op.x, []).extend(op.weights_)
    return weights_by_input


def measured_gates(program: Program, observed: Mapping[Weight, Floats]) -> dict[str, MeasuredGate]:
    """Returns the gates whose matmul inputs were recorded, by the name of their matrix."""
    makers = {value: op for op in program.ops for value in op.outputs}
    gates: dict[str, MeasuredGate] = {}
    for op in program.ops:
        if not isinstance(op, ActMul):
            continue
        maker, name = makers.get(op.gate), get_gate_name(op, makers)
        if isinstance(maker, Linear) and name and maker.weights_[0] in observed:
            first = sum(out.width for out in maker.outs[: maker.outs.index(op.gate)])
            gates[name] = MeasuredGate(op, maker, first, _get_last_linear(program, op.out))
    return gates


def _get_last_linear(program: Program, value: Value) -> Weight | None:
    readers = [op for op in program.ops if value in op.inputs]
    if len(readers) != 1 or not isinstance(readers[0], Linear):
        return None
    weights = readers[0].weights_
    return weights[0] if len(weights) == 1 else None


def _zeroed(program: Program, observed: Mapping[Weight, Floats]) -> list[Weight]:
    """Returns the matrices whose inputs come from an activation function that produces zeros."""
    last = [
        _get_last_linear(program, op.out)
        for op in program.ops
        if isinstance(op, Act | ActMul) and op.activation in ZEROING
    ]
    return [weight for weight in last if weight is not None and weight in observed]


def _widest(opened: Floats) -> NDArray[np.int64]:
    """Counts for each neuron the rows in which its gate is among the largest."""
    count = max(1, round(USED_SHARE * opened.shape[1]))
    widest = np.argpartition(-np.abs(opened), count - 1, axis=1)[:, :count]
    return np.bincount(widest.reshape(-1), minlength=opened.shape[1]).astype(np.int64)
