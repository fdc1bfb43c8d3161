"""Calibration file of activation sparsity: for each fraction of small activations, the threshold
below which they are zeroed and the error that this causes.

Defines the file format and chooses thresholds from a file; contains no arrays.
`activation_meter.py` does the measurements. Source of the greedy choice: TEAL (Liu et al. 2024),
algorithm 1, with measured losses per matmul instead of per block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from octavo.api.errors import ConfigError
from octavo.sparsity.neuron_predictors import NeuronPredictor
from octavo.sparsity.passes.sparsify import Thresholds

VERSION = 1
LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""Fractions of activations for which a curve has a threshold: 5% to 95%."""

USED_SHARE = 0.3
"""Fraction of a token's neurons that count as used (those with the largest gates) if the activation
function produces no zeros.
"""


class ActivationCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Threshold curve of a matmul input or of a gate."""

    weights: list[str]
    """Matrices that multiply the input, or the first matrix that computes the gate."""
    size: int
    """Number of weights in all these matrices."""
    thresholds: list[float]
    """Magnitude threshold for each fraction in LEVELS."""
    losses: list[float]
    """Fraction of the output's power that is lost at each fraction in LEVELS, assuming independent
    inputs.
    """

    def threshold(self, share: float) -> float:
        """Returns the threshold for a fraction, interpolated linearly between LEVELS."""
        known = [(0.0, 0.0), *zip(LEVELS, self.thresholds, strict=True)]
        for (left, low), (right, high) in pairwise(known):
            if share <= right:
                return low + (high - low) * (share - left) / (right - left)
        return self.thresholds[-1]


class NeuronUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often each neuron of one feed-forward layer was used."""

    weight: str
    """Matrix of the down projection; its inputs are the neurons."""
    counts: list[int]
    """Number of tokens that used each neuron."""

    def hottest(self, count: int) -> list[int]:
        """Returns the `count` most used neurons, most used first."""
        order = sorted(range(len(self.counts)), key=lambda neuron: -self.counts[neuron])
        return order[:count]


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of `octavo calibrate` for one model."""

    version: int
    fingerprint: str
    """Fingerprint of the weights that were measured."""
    num_tokens: int
    inputs: list[ActivationCurve]
    gates: list[ActivationCurve]
    neurons: list[NeuronUse] = []
    predictors: list[NeuronPredictor] = []

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        part.replace(path)


def read_calibration(
    path: Path, fingerprint: str | None, *, name: str = "calibration"
) -> Calibration:
    """Reads a calibration.

    Raises ConfigError if the file is damaged or its fingerprint differs from `fingerprint`; `name`
    is the option shown in the error.
    """
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise _config_error(name, path, error.strerror or str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _config_error(name, path, f"not a calibration file: {error}") from None
    if calibration.version != VERSION:
        raise _config_error(name, path, f"its version is {calibration.version}, expected {VERSION}")
    if fingerprint is not None and calibration.fingerprint != fingerprint:
        raise _config_error(name, path, "it was made for other weights")
    for curve in (*calibration.inputs, *calibration.gates):
        numbers = curve.thresholds + curve.losses
        fits = len(curve.thresholds) == len(curve.losses) == len(LEVELS) and curve.size > 0
        if not fits or not curve.weights or not all(0 <= each < 1e30 for each in numbers):
            raise _config_error(
                name, path, f"the curve of {', '.join(curve.weights) or 'nothing'} is damaged"
            )
    for layer in calibration.neurons:
        if not all(0 <= each <= calibration.num_tokens for each in layer.counts):
            raise _config_error(
                name, path, f"the counts of {layer.weight or 'nothing'} are damaged"
            )
    for predictor in calibration.predictors:
        if not predictor.is_whole:
            what = f"the predictor of {predictor.gate or 'nothing'} is damaged"
            raise _config_error(name, path, what)
    return calibration


def _config_error(name: str, path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{name}: {path}: {why}",
        hint="create one: octavo calibrate MODEL --text FILE --out FILE",
    )


def find_thresholds(
    calibration: Calibration,
    *,
    input_share: float,
    gate_share: float,
    plan: Literal["uniform", "greedy"],
) -> Thresholds:
    """Returns the thresholds that zero these fractions of inputs and gates."""
    curves = calibration.inputs if input_share else []
    shares = dict.fromkeys(range(len(curves)), input_share)
    if plan == "greedy":
        for block in _blocks(curves):
            shares |= greedy_shares({index: curves[index] for index in block}, input_share)
    gates = calibration.gates if gate_share else []
    return Thresholds(
        {
            name: curve.threshold(shares[index])
            for index, curve in enumerate(curves)
            for name in curve.weights
        },
        {name: curve.threshold(gate_share) for curve in gates for name in curve.weights},
    )


def greedy_shares(curves: Mapping[int, ActivationCurve], target: float) -> dict[int, float]:
    """Returns the fraction to zero on each curve so that the fraction `target` of all weights is
    skipped.

    Increases fractions in steps of 5%, each time on the curve that loses least per skipped weight.
    """
    steps = dict.fromkeys(curves, 0)
    target_weights = target * sum(curve.size for curve in curves.values())
    saved = 0.0

    def price(index: int) -> float:
        losses = [0.0, *curves[index].losses]
        step = steps[index]
        return (losses[step + 1] - losses[step]) / curves[index].size

    while True:
        open_ones = [index for index in curves if steps[index] < len(LEVELS)]
        best = min(open_ones, key=price)
        gain = LEVELS[0] * curves[best].size
        if saved + gain >= target_weights:
            rest = (target_weights - saved) / curves[best].size
            shares = {index: LEVELS[0] * step for index, step in steps.items()}
            return shares | {best: shares[best] + rest}
        saved += gain
        steps[best] += 1


def _blocks(curves: Iterable[ActivationCurve]) -> list[list[int]]:
    """Groups curve indices by layer: the first number in the weight's name."""
    blocks: dict[str, list[int]] = {}
    for index, curve in enumerate(curves):
        match = re.search(r"\.(\d+)\.", curve.weights[0])
        blocks.setdefault(match.group(1) if match else "", []).append(index)
    return list(blocks.values())
