"""Fits predictors of feed-forward neurons on recorded activations and evaluates them on held-out
text.

The target is the square root of a neuron's contribution to the output: |f(gate) * up| times the
norm of its down column. The gate alone is not informative near or below zero; the square root
limits the influence of a few large values. Source of reduced-rank regression: Izenman 1975.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError, UnsupportedModel
from octavo.program.ops import Attention, Linear, MlaAttention
from octavo.program.program import Program, Weight
from octavo.sparsity.activation_meter import Floats, MeasuredGate, measured_gates
from octavo.sparsity.neuron_predictors import SHARES, WANTED_SHARE, NeuronPredictor

RIDGE = 1e-3
"""Ridge term, as a fraction of the inputs' mean power."""

Doubles = NDArray[np.float64]


@dataclass(slots=True)
class _Sums:
    """Sums over rows of the attention's input x and the target y."""

    x: Doubles
    y: Doubles
    xx: Doubles
    xy: Floats
    count: int = 0

    @classmethod
    def of(cls, num_x: int, num_y: int) -> _Sums:
        return cls(
            np.zeros(num_x),
            np.zeros(num_y),
            np.zeros((num_x, num_x)),
            np.zeros((num_x, num_y), np.float32),
        )

    def add(self, x: Floats, y: Floats) -> None:
        """Adds rows `[T, num_x]` and `[T, num_y]`."""
        self.x += x.sum(axis=0, dtype=np.float64)
        self.y += y.sum(axis=0, dtype=np.float64)
        self.xx += x.T @ x
        self.xy += x.T @ y
        self.count += len(x)


@dataclass(frozen=True, slots=True)
class _Solved:
    """Arrays of a fitted predictor, in the file's precision."""

    down: NDArray[np.float16]
    up: NDArray[np.float16]
    bias: Floats

    def scores(self, x: Floats) -> Floats:
        """Computes the scores of rows `[T, num_inputs]`."""
        low = x @ self.down.T.astype(np.float32)
        scores: Floats = low @ self.up.T.astype(np.float32) + self.bias
        return scores


class PredictorFit:
    """Predictors of all gates of a Program: call `take` on rows, `solve`, then `evaluate` on other
    rows.
    """

    def __init__(
        self,
        program: Program,
        observed: Mapping[Weight, Floats],
        floats: Callable[[Weight], Floats],
        rank: int,
    ) -> None:
        """`floats` reads a weight as fp32, `[out, in]`."""
        self._observed = observed
        self._gates = measured_gates(program, observed)
        if not self._gates:
            raise UnsupportedModel(
                f"predictor_rank: {program.name} has no gates to predict",
                hint="remove predictor_rank",
            )
        self._inputs = {
            name: _attention_input(program, gate, observed) for name, gate in self._gates.items()
        }
        self._sums = {
            name: _Sums.of(self._inputs[name].shape[1], gate.op.out.width)
            for name, gate in self._gates.items()
        }
        for name, gate in self._gates.items():
            max_rank = min(self._inputs[name].shape[1], gate.op.out.width)
            if rank > max_rank:
                raise ConfigError(
                    f"predictor_rank: got {rank}, expected at most {max_rank}, its smallest dim",
                    hint="use 64, for example",
                )
        self._lasts = {
            name: _get_last_linear(program, gate, observed) for name, gate in self._gates.items()
        }
        self._lengths: dict[str, Floats] = {
            name: np.linalg.norm(floats(last), axis=0).astype(np.float32)
            for name, last in self._lasts.items()
        }
        """Norm of each neuron's column of the down projection, `[neurons]`."""
        self._rank = rank
        self._solved: dict[str, _Solved] = {}
        self._least: dict[str, list[Doubles]] = {name: [] for name in self._gates}
        self._recall: dict[str, list[Doubles]] = {name: [] for name in self._gates}

    def take(self, num_rows: int) -> None:
        """Adds the first rows that the last step recorded."""
        for name in self._gates:
            x = self._observed[self._inputs[name]][:num_rows]
            self._sums[name].add(x, np.sqrt(self._added(name, num_rows)))

    def solve(self) -> None:
        """Fits the predictors to the rows added so far."""
        for name in self._gates:
            self._solved[name] = _solve(self._sums.pop(name), self._rank)

    def evaluate(self, num_rows: int) -> None:
        """Evaluates the predictors on the first rows that the last step recorded."""
        for name in self._gates:
            scores = self._solved[name].scores(self._observed[self._inputs[name]][:num_rows])
            added = self._added(name, num_rows)
            is_wanted = added >= np.quantile(added, 1 - WANTED_SHARE, axis=1, keepdims=True)
            thresholds = np.quantile(scores, 1 - np.array(SHARES))
            of_wanted = np.sort(scores[is_wanted])
            recall = 1 - np.searchsorted(of_wanted, thresholds) / len(of_wanted)
            self._least[name].append(thresholds)
            self._recall[name].append(recall)

    def _added(self, name: str, num_rows: int) -> Floats:
        """Returns the norm of each neuron's contribution to the output, `[num_rows, neurons]`."""
        added: Floats = np.abs(self._observed[self._lasts[name]][:num_rows]) * self._lengths[name]
        return added

    def predictors(self) -> list[NeuronPredictor]:
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
    """Returns the first matrix of the query projection of the attention before a gate."""
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
        f"predictor_rank: {program.name} has no attention before"
        f" {gate.maker.weights_[0].name}, so there is no input to predict it from",
        hint="remove predictor_rank",
    )


def _get_last_linear(
    program: Program, gate: MeasuredGate, observed: Mapping[Weight, Floats]
) -> Weight:
    """Returns the down projection that follows a gate."""
    if gate.last is None or gate.last not in observed:
        raise UnsupportedModel(
            f"predictor_rank: {program.name} has no separate down projection after"
            f" {gate.maker.weights_[0].name}",
            hint="remove predictor_rank",
        )
    return gate.last


def _solve(sums: _Sums, rank: int) -> _Solved:
    """Returns the best predictor of y from x with the given rank.

    y is scaled to a mean of 1, so that fp16 represents it well.
    """
    mean_x, mean_y = sums.x / sums.count, sums.y / sums.count
    scale = 1 / max(float(mean_y.mean()), 1e-30)
    mean_y *= scale
    power = sums.xx / sums.count - np.outer(mean_x, mean_x)
    shared = scale * sums.xy / sums.count - np.outer(mean_x, mean_y)
    power[np.diag_indices_from(power)] += RIDGE * np.trace(power) / len(power) + 1e-12
    root = np.linalg.cholesky(power)
    whitened = np.linalg.solve(root, shared)
    _, vectors = np.linalg.eigh(whitened @ whitened.T)
    best = vectors[:, ::-1][:, :rank]
    down = np.linalg.solve(root.T, best).T.astype(np.float16)
    up = (best.T @ whitened).T.astype(np.float16)
    mean = mean_y - up.astype(np.float64) @ (down.astype(np.float64) @ mean_x)
    return _Solved(down, up, mean.astype(np.float32))
