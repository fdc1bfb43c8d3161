"""Fits predictors of feed-forward gates to what a backend has observed of a text, and measures on
another part of the text what they find.

A gate is a product of the layer's input, so the sums kept are those of a regression of that input
on the attention's; the gates' own matrix comes in when it is solved. Knows Programs and arrays;
`wiring/calibrate.py` runs the text. Source of the regression of reduced rank: Izenman 1975.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.reference.ops import gated
from octavo.errors import ConfigError, UnsupportedModel
from octavo.program.neuron_predictors import SHARES, WANTED_SHARE, NeuronPredictor
from octavo.program.ops import Attention, Linear, MlaAttention
from octavo.program.program import Program, Weight
from octavo.worker.activation_meter import Floats, MeasuredGate, measured_gates

RIDGE = 1e-3
"""Share of the inputs' mean power that is added to each of them, which keeps small ones small."""

Doubles = NDArray[np.float64]


@dataclass(slots=True)
class _Sums:
    """Sums over rows of the attention's input x and of the layer's input z."""

    x: Doubles
    z: Doubles
    xx: Doubles
    xz: Doubles
    count: int = 0

    @classmethod
    def of(cls, num_x: int, num_z: int) -> _Sums:
        return cls(
            np.zeros(num_x), np.zeros(num_z), np.zeros((num_x, num_x)), np.zeros((num_x, num_z))
        )

    def add(self, x: Floats, z: Floats) -> None:
        """Takes in rows `[T, num_x]` and `[T, num_z]`."""
        self.x += x.sum(axis=0, dtype=np.float64)
        self.z += z.sum(axis=0, dtype=np.float64)
        self.xx += x.T @ x
        self.xz += x.T @ z
        self.count += len(x)


@dataclass(frozen=True, slots=True)
class _Solved:
    """A predictor's numbers, as its file has them."""

    down: NDArray[np.float16]
    up: NDArray[np.float16]
    bias: Floats

    def scores(self, x: Floats) -> Floats:
        """Computes the scores of rows `[T, num_inputs]`."""
        low = x @ self.down.T.astype(np.float32)
        scores: Floats = low @ self.up.T.astype(np.float32) + self.bias
        return scores


class PredictorFit:
    """Predictors of all of a Program's gates: `take` rows, `solve`, then `judge` other rows."""

    def __init__(
        self,
        program: Program,
        observed: Mapping[Weight, Floats],
        floats: Callable[[Weight], Floats],
        rank: int,
    ) -> None:
        """Takes in `floats` what reads a weight, `[out, in]`."""
        self._observed, self._floats = observed, floats
        self._gates = measured_gates(program, observed)
        if not self._gates:
            raise UnsupportedModel(
                f"{program.name} has no gates to predict", hint="leave predictor_rank out"
            )
        self._inputs = {
            name: _attention_input(program, gate, observed) for name, gate in self._gates.items()
        }
        self._sums = {
            name: _Sums.of(self._inputs[name].shape[1], gate.maker.x.width)
            for name, gate in self._gates.items()
        }
        for name, gate in self._gates.items():
            most = min(self._inputs[name].shape[1], gate.op.out.width)
            if rank > most:
                raise ConfigError(
                    f"predictor_rank: got {rank}, allowed is at most {most}, the width of the"
                    " model",
                    hint="64 is a usual one",
                )
        self._rank = rank
        self._solved: dict[str, _Solved] = {}
        self._least: dict[str, list[Doubles]] = {name: [] for name in self._gates}
        self._recall: dict[str, list[Doubles]] = {name: [] for name in self._gates}

    def take(self, num_rows: int) -> None:
        """Takes in the first rows of what the last step observed."""
        for name, gate in self._gates.items():
            x = self._observed[self._inputs[name]][:num_rows]
            self._sums[name].add(x, self._observed[gate.maker.weights_[0]][:num_rows])

    def solve(self) -> None:
        """Makes the predictors of what was taken in."""
        for name, gate in self._gates.items():
            matrix, bias = gate.projection(self._floats)
            self._solved[name] = _solve(self._sums.pop(name), matrix, bias, self._rank)

    def judge(self, num_rows: int) -> None:
        """Measures the predictors on the first rows of what the last step observed."""
        for name, gate in self._gates.items():
            scores = self._solved[name].scores(self._observed[self._inputs[name]][:num_rows])
            matrix, bias = gate.projection(self._floats)
            rows = self._observed[gate.maker.weights_[0]][:num_rows]
            opened = np.abs(_opened(rows @ matrix.T + bias, gate))
            wanted = opened >= np.quantile(opened, 1 - WANTED_SHARE, axis=1, keepdims=True)
            least = np.quantile(scores, 1 - np.array(SHARES))
            of_wanted = np.sort(scores[wanted])
            found = 1 - np.searchsorted(of_wanted, least) / len(of_wanted)
            self._least[name].append(least)
            self._recall[name].append(found)

    def predictors(self) -> list[NeuronPredictor]:
        """Returns the predictors, in the Program's order."""
        return [
            NeuronPredictor(
                gate=name,
                input=self._inputs[name].name,
                rank=self._rank,
                num_inputs=solved.down.shape[1],
                num_neurons=solved.up.shape[0],
                down=solved.down.tobytes(),
                up=solved.up.tobytes(),
                bias=solved.bias.tobytes(),
                least=np.mean(self._least[name], axis=0).tolist(),
                recall=np.mean(self._recall[name], axis=0).tolist(),
            )
            for name, solved in self._solved.items()
        ]


def _attention_input(
    program: Program, gate: MeasuredGate, observed: Mapping[Weight, Floats]
) -> Weight:
    """Returns the first matrix of the product that makes the queries of the attention before a
    gate.
    """
    makers = {value: op for op in program.ops for value in op.outputs}
    before = program.ops[: program.ops.index(gate.op)]
    attention = next(
        (op for op in reversed(before) if isinstance(op, Attention | MlaAttention)), None
    )
    if attention is not None:
        value = attention.q if isinstance(attention, Attention) else attention.q_nope
        while (maker := makers.get(value)) is not None and maker.inputs:
            if isinstance(maker, Linear) and maker.weights_[0] in observed:
                return maker.weights_[0]
            value = maker.inputs[0]
    raise UnsupportedModel(
        f"{program.name} has no attention before {gate.maker.weights_[0].name}, whose input could"
        " predict it",
        hint="leave predictor_rank out",
    )


def _solve(sums: _Sums, matrix: Floats, bias: Floats, rank: int) -> _Solved:
    """Returns the best predictor of a rank: of the gates z @ matrix^T + bias by x."""
    mean_x, mean_z = sums.x / sums.count, sums.z / sums.count
    power = sums.xx / sums.count - np.outer(mean_x, mean_x)
    shared = sums.xz / sums.count - np.outer(mean_x, mean_z)
    power[np.diag_indices_from(power)] += RIDGE * np.trace(power) / len(power) + 1e-12
    root = np.linalg.cholesky(power)
    whitened = np.linalg.solve(root, shared) @ matrix.T.astype(np.float64)
    _, vectors = np.linalg.eigh(whitened @ whitened.T)
    best = vectors[:, ::-1][:, :rank]
    down = np.linalg.solve(root.T, best).T.astype(np.float16)
    up = (best.T @ whitened).T.astype(np.float16)
    mean = matrix.astype(np.float64) @ mean_z + bias
    mean -= up.astype(np.float64) @ (down.astype(np.float64) @ mean_x)
    return _Solved(down, up, mean.astype(np.float32))


def _opened(gates: Floats, gate: MeasuredGate) -> Doubles:
    ones = np.full(gates.shape, 1.0 - gate.op.up_offset)
    return gated(gates.astype(np.float64), ones, gate.op)
