"""Measures how small the numbers are that a model multiplies, from what a backend has observed.

Numbers are counted by the upper bits of their magnitude, 64 classes for each power of two, so that
any amount of text takes the same memory. Knows Programs and arrays; `calibrate.py` runs the text.
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
from octavo.sparsity.passes.sparsify import gate_of

Floats = NDArray[np.float32]

DROPPED_BITS = 17
"""Lower bits of an fp32 number that its class leaves out."""

NUM_CLASSES = 1 << (31 - DROPPED_BITS)


@dataclass(slots=True)
class Magnitudes:
    """Numbers of one kind, counted by class."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(NUM_CLASSES, np.int64))
    powers: NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_CLASSES))
    """Sum of what the numbers of each class add to the power of the product."""

    def add(self, numbers: Floats, gains: NDArray[np.float64]) -> None:
        """Counts numbers `[T, N]`, of which column n is multiplied with a power of `gains[n]`."""
        magnitudes = np.ascontiguousarray(np.abs(numbers), np.float32)
        classes = (magnitudes.view(np.uint32) >> DROPPED_BITS).reshape(-1)
        powers = np.square(magnitudes, dtype=np.float64) * gains
        self.counts += np.bincount(classes, minlength=NUM_CLASSES)[:NUM_CLASSES]
        self.powers += np.bincount(classes, powers.reshape(-1), NUM_CLASSES)[:NUM_CLASSES]

    def curve(self, weights: list[str], size: int) -> ActivationCurve:
        """Returns the thresholds of LEVELS, upper ends of classes, and the shares of power."""
        below, lost = np.cumsum(self.counts), np.cumsum(self.powers)
        at = np.searchsorted(below, np.array(LEVELS) * below[-1])
        ends = ((at + 1).astype(np.uint32) << DROPPED_BITS).view(np.float32)
        losses = lost[at] / max(float(lost[-1]), 1e-30)
        return ActivationCurve(weights, size, ends.tolist(), losses.tolist())


@dataclass(frozen=True, slots=True)
class MeasuredGate:
    """An ActMul and the product that makes its gate."""

    op: ActMul
    maker: Linear
    first: int
    """First output of the product that is the gate's."""
    last: Weight | None
    """Matrix of the one product that reads what the gate lets through; None where others do."""

    def projection(self, floats: Callable[[Weight], Floats]) -> tuple[Floats, Floats]:
        """Returns the matrix `[gates, in]` and the bias `[gates]` that make the gates."""
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
    """Takes the inputs of a Program's products, step by step."""

    def __init__(
        self, program: Program, observed: ObservedInputs, floats: Callable[[Weight], Floats]
    ) -> None:
        """Takes in `floats` what reads a weight, `[out, in]`."""
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
        """Counts the first rows of what the last step observed."""
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
        """Returns for each gate, in the Program's order, the neurons that it opens widest in each
        of the last step's first rows, `[num_rows, share * neurons]`, by number.
        """
        found = []
        for gate in self._gates.values():
            opened = np.abs(self._open(gate, num_rows))
            count = max(1, round(share * opened.shape[1]))
            widest = np.argpartition(-opened, count - 1, axis=1)[:, :count]
            found.append(np.sort(widest, axis=1))
        return found

    def inputs(self) -> list[ActivationCurve]:
        """Returns the curves of products' inputs, in the Program's order."""
        return [
            self._inputs[value].curve(
                [weight.name for weight in weights],
                sum(weight.shape[0] * weight.shape[1] for weight in weights),
            )
            for value, weights in self._products.items()
        ]

    def gates(self) -> list[ActivationCurve]:
        """Returns the curves of gates, in the Program's order."""
        return [
            self._opened[name].curve([name], gate.op.out.width * gate.maker.x.width)
            for name, gate in self._gates.items()
        ]

    def neurons(self) -> list[NeuronUse]:
        """Returns how often the neurons of each layer were used: where an activation makes zeros,
        those that are none, else those whose gates are among the widest open.
        """
        return [NeuronUse(name, counts.tolist()) for name, counts in self._used.items()]

    def _open(self, gate: MeasuredGate, num_rows: int) -> Floats:
        """Computes f(gate) of the last step's rows."""
        rows = self._observed[gate.maker.weights_[0]][:num_rows]
        matrix, bias = gate.projection(self._floats)
        products = rows @ matrix.T + bias
        ones = np.full(products.shape, 1.0 - gate.op.up_offset)
        opened: Floats = gated(products.astype(np.float64), ones, gate.op).astype(np.float32)
        return opened


def _by_input(program: Program, observed: Mapping[Weight, Floats]) -> dict[Value, list[Weight]]:
    """Returns the matrices that each observed input meets, in the Program's order."""
    found: dict[Value, list[Weight]] = {}
    for op in program.ops:
        if (
            isinstance(op, Linear)
            and op.x.axis == "tokens"
            and all(weight in observed for weight in op.weights_)
        ):
            found.setdefault(op.x, []).extend(op.weights_)
    return found


def measured_gates(program: Program, observed: Mapping[Weight, Floats]) -> dict[str, MeasuredGate]:
    """Returns the gates that observed products make, by the name of their matrix."""
    makers = {value: op for op in program.ops for value in op.outputs}
    found: dict[str, MeasuredGate] = {}
    for op in program.ops:
        if not isinstance(op, ActMul):
            continue
        maker, name = makers.get(op.gate), gate_of(op, makers)
        if isinstance(maker, Linear) and name and maker.weights_[0] in observed:
            first = sum(out.width for out in maker.outs[: maker.outs.index(op.gate)])
            found[name] = MeasuredGate(op, maker, first, _last_product(program, op.out))
    return found


def _last_product(program: Program, value: Value) -> Weight | None:
    readers = [op for op in program.ops if value in op.inputs]
    if len(readers) != 1 or not isinstance(readers[0], Linear):
        return None
    weights = readers[0].weights_
    return weights[0] if len(weights) == 1 else None


def _zeroed(program: Program, observed: Mapping[Weight, Floats]) -> list[Weight]:
    """Returns the matrices of products whose inputs an activation has made zeros of."""
    last = [
        _last_product(program, op.out)
        for op in program.ops
        if isinstance(op, Act | ActMul) and op.activation in ZEROING
    ]
    return [weight for weight in last if weight is not None and weight in observed]


def _widest(opened: Floats) -> NDArray[np.int64]:
    """Counts for each neuron the rows in which its gate is among the widest open."""
    count = max(1, round(USED_SHARE * opened.shape[1]))
    widest = np.argpartition(-np.abs(opened), count - 1, axis=1)[:, :count]
    return np.bincount(widest.reshape(-1), minlength=opened.shape[1]).astype(np.int64)
