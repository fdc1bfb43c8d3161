"""Reads a model's neuron predictors from a calibration and adds them to its Program and weights.

`calibrate.py` fits them; `neuron_predictors.py` defines their format.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError
from octavo.checkpoint.extended import ExtendedCheckpoint, ExtendedHeader
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import expand_path
from octavo.program.program import Program
from octavo.sparsity.activation_curves import read_calibration
from octavo.sparsity.neuron_predictors import NeuronPredictor
from octavo.sparsity.options import NeuronOptions, SparsityOptions
from octavo.sparsity.passes.predict import PredictorShape, predict
from octavo.sparsity.thresholds import weights_name

NAME = "sparsity_predictor"


@dataclass(frozen=True)
class Predictors:
    """Predictors of one model, and the fraction of neurons that they select."""

    path: Path
    found: tuple[NeuronPredictor, ...]
    share: float
    lookahead: int = 0
    """Number of layers ahead that are predicted as well."""

    @cached_property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays of all predictors, by weight name."""
        return {
            name: np.asarray(array)
            for predictor in self.found
            for name, array in predictor.tensors(self.share).items()
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the arrays."""
        sha256 = hashlib.sha256()
        for name, array in self.tensors.items():
            sha256.update(name.encode() + array.tobytes())
        return sha256.hexdigest()

    def apply(self, program: Program) -> Program:
        shapes = [
            PredictorShape(predictor.gate, predictor.input, predictor.rank)
            for predictor in self.found
        ]
        return predict(program, shapes, lookahead=self.lookahead)


class PredictorHeader(ExtendedHeader):
    """A header that includes the predictors' tensors."""

    def __init__(self, header: ModelHeader, predictors: Predictors) -> None:
        super().__init__(header, predictors.tensors)
        self.predictors = predictors


class PredictorCheckpoint(ExtendedCheckpoint):
    """A checkpoint that includes the predictors' tensors."""

    def __init__(self, checkpoint: Checkpoint, predictors: Predictors) -> None:
        super().__init__(checkpoint, predictors.tensors, predictors.path)
        self.predictors = predictors


def predictors_in(header: ModelHeader) -> Predictors | None:
    if isinstance(header, PredictorHeader | PredictorCheckpoint):
        return header.predictors
    return None


def open_predictors(config: EngineConfig, checkpoint: Checkpoint | None) -> Predictors | None:
    """Reads the predictors that the options name; returns None if they name none.

    Raises ConfigError if they were fitted to other weights; without a checkpoint (when only
    planning) this is not checked.
    """
    options = config.of(SparsityOptions)
    if options.sparsity_predictor is None:
        return None
    path = expand_path(options.sparsity_predictor)
    weights = None if checkpoint is None else weights_name(checkpoint)
    calibration = read_calibration(path, weights, name=NAME)
    if not calibration.predictors:
        raise ConfigError(
            f"{NAME}: {path}: the file has no predictors",
            hint="create them: octavo calibrate MODEL --text FILE --out FILE --predictor-rank 64",
        )
    lookahead = config.of(NeuronOptions).weights_lookahead
    return Predictors(path, tuple(calibration.predictors), options.predicted_share, lookahead)
