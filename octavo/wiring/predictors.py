"""The predictors of a model's neurons: reads them from a calibration and puts them into the model's
Program and among its weights.

`wiring/calibrate.py` makes them; what they are is `octavo/program/neuron_predictors.py`.
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
from octavo.checkpoint.added import CheckpointWith, HeaderWith
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import user_path
from octavo.program.activation_curves import Calibration, read_calibration
from octavo.program.neuron_predictors import NeuronPredictor
from octavo.program.passes.predict import PredictorShape, predict
from octavo.program.program import Program
from octavo.wiring.sparsity import weights_name

NAME = "sparsity_predictor"


@dataclass(frozen=True)
class Predictors:
    """The predictors of one model, of which each computes a share of its layer's neurons."""

    path: Path
    found: tuple[NeuronPredictor, ...]
    share: float
    lookahead: int = 0
    """Layers before its own in which each guesses as well."""

    @cached_property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """Numbers of all predictors by the name of the weight."""
        return {
            name: np.asarray(array)
            for each in self.found
            for name, array in each.tensors(self.share).items()
        }

    @cached_property
    def digest(self) -> str:
        """Name of these numbers."""
        found = hashlib.sha256()
        for name, array in self.tensors.items():
            found.update(name.encode() + array.tobytes())
        return found.hexdigest()

    def into(self, program: Program) -> Program:
        """Returns the Program with predictors."""
        shapes = [PredictorShape(each.gate, each.input, each.rank) for each in self.found]
        return predict(program, shapes, lookahead=self.lookahead)

    def beside(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint with the predictors' tensors."""
        return CheckpointWith(checkpoint, self.tensors, self.path)

    def in_header(self, header: ModelHeader) -> ModelHeader:
        """Returns the header with the predictors' tensors."""
        return HeaderWith(header, self.tensors)


def open_predictors(config: EngineConfig, checkpoint: Checkpoint) -> Predictors | None:
    """Reads the predictors that the options name; None where they name none. ConfigError where
    they are of other weights.
    """
    if config.sparsity.sparsity_predictor is None:
        return None
    path = user_path(config.sparsity.sparsity_predictor)
    return _predictors(config, read_calibration(path, weights_name(checkpoint), name=NAME), path)


def predictors_of_file(config: EngineConfig) -> Predictors | None:
    """Reads the predictors that the options name, whatever weights they are of: enough for a plan,
    which has none; None where the options name no file.
    """
    if config.sparsity.sparsity_predictor is None:
        return None
    path = user_path(config.sparsity.sparsity_predictor)
    return _predictors(config, read_calibration(path, None, name=NAME), path)


def _predictors(config: EngineConfig, found: Calibration, path: Path) -> Predictors:
    if not found.predictors:
        raise ConfigError(
            f"{NAME}: {path}: it has no predictors",
            hint="make some: octavo calibrate MODEL --text FILE --out FILE --predictor-rank 64",
        )
    share, lookahead = config.sparsity.predicted_share, config.offload.weights_lookahead
    return Predictors(path, tuple(found.predictors), share, lookahead)
