"""The predictors of a model's neurons: reads them from a calibration and puts them into the model's
Program and among its weights.

`sparsity/calibrate.py` makes them; what they are is `octavo/sparsity/neuron_predictors.py`.
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
from octavo.program.program import Program
from octavo.sparsity.activation_curves import read_calibration
from octavo.sparsity.neuron_predictors import NeuronPredictor
from octavo.sparsity.options import NeuronOptions, SparsityOptions
from octavo.sparsity.passes.predict import PredictorShape, predict
from octavo.sparsity.thresholds import weights_name

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


class PredictorHeader(HeaderWith):
    """A header that knows of predictors' tensors."""

    def __init__(self, header: ModelHeader, predictors: Predictors) -> None:
        super().__init__(header, predictors.tensors)
        self.predictors = predictors


class PredictorCheckpoint(CheckpointWith):
    """A checkpoint that has predictors' tensors."""

    def __init__(self, checkpoint: Checkpoint, predictors: Predictors) -> None:
        super().__init__(checkpoint, predictors.tensors, predictors.path)
        self.predictors = predictors


def predictors_in(header: ModelHeader) -> Predictors | None:
    """Returns the predictors of a header or a checkpoint; None if it has none."""
    if isinstance(header, PredictorHeader | PredictorCheckpoint):
        return header.predictors
    return None


def open_predictors(config: EngineConfig, checkpoint: Checkpoint | None) -> Predictors | None:
    """Reads the predictors that the options name; None if they name none. ConfigError if they are
    of other weights; without a checkpoint they may be of any, which is enough for a plan.
    """
    options = config.of(SparsityOptions)
    if options.sparsity_predictor is None:
        return None
    path = user_path(options.sparsity_predictor)
    weights = None if checkpoint is None else weights_name(checkpoint)
    found = read_calibration(path, weights, name=NAME)
    if not found.predictors:
        raise ConfigError(
            f"{NAME}: {path}: it has no predictors",
            hint="make some: octavo calibrate MODEL --text FILE --out FILE --predictor-rank 64",
        )
    lookahead = config.of(NeuronOptions).weights_lookahead
    return Predictors(path, tuple(found.predictors), options.predicted_share, lookahead)
