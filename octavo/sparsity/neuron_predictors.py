"""Low-rank predictors of feed-forward neurons from the attention's input, so that a token's neurons
are known before the layer is reached: their numbers, and what they find.

Owns their part of a calibration's file. `worker/predictor_fit.py` makes them. Source of the idea:
DejaVu (Liu et al. 2023, arXiv 2310.17157); here the predictor is a regression of reduced rank, not
a trained network.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

SHARES = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Shares of a layer's neurons for which a predictor has a least score: 5% to 95%."""

WANTED_SHARE = 0.1
"""Share of a token's neurons that a predictor should find, those that add most to the layer's
output."""


class NeuronPredictor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The predictor of one layer: score = up (down x) + bias, of a row x of the attention's input,
    after its norm.
    """

    gate: str
    """First matrix that makes the gate."""
    input: str
    """First matrix that reads the attention's input."""
    rank: int
    num_inputs: int
    num_neurons: int
    down: bytes
    """Numbers `[rank, num_inputs]`, fp16."""
    up: bytes
    """Numbers `[num_neurons, rank]`, fp16."""
    bias: bytes
    """Numbers `[num_neurons]`, fp32."""
    least: list[float]
    """Score from which on each share of SHARES of all neurons and tokens is."""
    recall: list[float]
    """Share of a token's neurons that add most which are among these, on text that it was not made
    of."""

    @property
    def is_whole(self) -> bool:
        """Whether its numbers are as many as its shape says."""
        return (
            0 < self.rank <= min(self.num_inputs, self.num_neurons)
            and len(self.down) == 2 * self.rank * self.num_inputs
            and len(self.up) == 2 * self.num_neurons * self.rank
            and len(self.bias) == 4 * self.num_neurons
            and len(self.least) == len(self.recall) == len(SHARES)
            and all(abs(each) < 1e30 for each in self.least)
            and all(0 <= each <= 1 for each in self.recall)
        )

    def least_score(self, share: float) -> float:
        """Returns the score from which on a share of the neurons is, between two of SHARES on a
        straight line; below every score where the share is 1.
        """
        if share >= 1:
            return -float(np.finfo(np.float32).max) / 4
        known = list(zip(SHARES, self.least, strict=True))
        for (left, high), (right, low) in pairwise(known):
            if share <= right:
                return high + (low - high) * max(0.0, share - left) / (right - left)
        return known[-1][1]

    def tensors(self, share: float) -> dict[str, NDArray[np.float16] | NDArray[np.float32]]:
        """Returns its matrices and its bias by the names that `passes/predict.py` reads them by;
        scores are negative where a neuron is not among the share.
        """
        names = PredictorNames(self.gate)
        bias = np.frombuffer(self.bias, np.float32) - np.float32(self.least_score(share))
        return {
            names.down: np.frombuffer(self.down, np.float16).reshape(self.rank, -1),
            names.up: np.frombuffer(self.up, np.float16).reshape(-1, self.rank),
            names.bias: bias.astype(np.float32),
        }


class PredictorNames:
    """Names of a predictor's weights, after the matrix that makes the gate."""

    def __init__(self, gate: str) -> None:
        stem = gate.removesuffix(".weight")
        self.down = f"{stem}.predictor.down.weight"
        self.up = f"{stem}.predictor.up.weight"
        self.bias = f"{stem}.predictor.up.bias"
