"""Low-rank predictors of active feed-forward neurons, computed from the attention's input so that
neurons can be prefetched before the layer starts.

Defines their part of the calibration file; `predictor_fit.py` fits them. Based on DejaVu (Liu et
al. 2023, arXiv 2310.17157), with reduced-rank regression instead of a trained network.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

SHARES = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Fractions of a layer's neurons for which a predictor has a threshold: 5% to 95%."""

WANTED_SHARE = 0.1
"""Fraction of a token's neurons (those that contribute most to the output) for which recall is
measured.
"""


class NeuronPredictor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Predictor of one layer: score = up (down x) + bias, for a row x of the attention's normed
    input.
    """

    gate: str
    """First matrix that computes the gate."""
    input: str
    """First matrix that reads the attention's input."""
    rank: int
    num_inputs: int
    num_neurons: int
    down: bytes
    """`[rank, num_inputs]` fp16"""
    up: bytes
    """`[num_neurons, rank]` fp16"""
    bias: bytes
    """`[num_neurons]` fp32"""
    least: list[float]
    """Score threshold for each fraction in SHARES."""
    recall: list[float]
    """Recall of the most contributing neurons at each fraction in SHARES, on held-out text."""

    @property
    def is_whole(self) -> bool:
        """Whether array sizes match the shape and all values are in range."""
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
        """Returns the score threshold that selects the fraction `share` of the neurons,
        interpolated between SHARES. For 1, the threshold is below every score.
        """
        if share >= 1:
            return -float(np.finfo(np.float32).max) / 4
        known = list(zip(SHARES, self.least, strict=True))
        for (left, high), (right, low) in pairwise(known):
            if share <= right:
                return high + (low - high) * max(0.0, share - left) / (right - left)
        return known[-1][1]

    def tensors(self, share: float) -> dict[str, NDArray[np.float16] | NDArray[np.float32]]:
        """Returns the matrices and the bias under the names that `passes/predict.py` uses.

        The bias is shifted so that scores of unselected neurons are negative.
        """
        names = PredictorNames(self.gate)
        bias = np.frombuffer(self.bias, np.float32) - np.float32(self.least_score(share))
        return {
            names.down: np.frombuffer(self.down, np.float16).reshape(self.rank, -1),
            names.up: np.frombuffer(self.up, np.float16).reshape(-1, self.rank),
            names.bias: bias.astype(np.float32),
        }


class PredictorNames:
    """Names of a predictor's weights, derived from the matrix that computes the gate."""

    def __init__(self, gate: str) -> None:
        stem = gate.removesuffix(".weight")
        self.down = f"{stem}.predictor.down.weight"
        self.up = f"{stem}.predictor.up.weight"
        self.bias = f"{stem}.predictor.up.bias"
