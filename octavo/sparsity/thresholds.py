"""Applies a calibration's thresholds to a Program and checks that they belong to its weights."""

from __future__ import annotations

from octavo.api.errors import ConfigError
from octavo.checkpoint.ports import Checkpoint
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import expand_path, open_state_home
from octavo.program.ops import ActMul
from octavo.program.program import Program
from octavo.sparsity.activation_curves import find_thresholds, read_calibration
from octavo.sparsity.options import NeuronOptions, SparsityOptions
from octavo.sparsity.passes.sparsify import Thresholds, get_gate_name, sparsify
from octavo.worker.kv_connectors.fingerprint import fingerprint


def for_sparsity(config: EngineConfig, checkpoint: Checkpoint, program: Program) -> Program:
    """Returns the Program with sparsity thresholds, if the options enable them."""
    options = config.of(SparsityOptions)
    if not options.is_approximate:
        return program
    name = next(
        (each for each in ("sparsity_predictor", "kv_selection") if getattr(options, each)),
        "activation_sparsity",
    )
    if "pooled" in program.outputs:
        raise ConfigError(
            f"{name}: {config.model.model} is a pooling model; sparsity requires a generation"
            " model",
            hint=f"remove {name} and ffn_sparsity",
        )
    if any(group.kind == "cross" for group in program.groups):
        raise ConfigError(
            f"{name}: {config.model.model} is an encoder-decoder; sparsity requires a decoder-only"
            f" model",
            hint=f"remove {name} and ffn_sparsity",
        )
    if options.calibration is None:
        return program  # it already contains the predictors
    calibration = read_calibration(expand_path(options.calibration), weights_name(checkpoint))
    gate_share = options.gate_sparsity
    if gate_share and not calibration.gates:
        raise ConfigError(
            f"ffn_sparsity: got {options.ffn_sparsity}, but {program.name} has no gates",
            hint="use activation_sparsity",
        )
    thresholds = find_thresholds(
        calibration,
        input_share=options.activation_sparsity,
        gate_share=gate_share,
        plan=options.activation_sparsity_plan,
    )
    return sparsify(program, thresholds)


def hot_neurons(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, list[int]] | None:
    """Returns the neurons of each down projection, most used first; None if `hot_neurons` is not
    set.
    """
    named = config.of(NeuronOptions).hot_neurons
    if named is None:
        return None
    path = expand_path(named)
    calibration = read_calibration(path, weights_name(checkpoint), name="hot_neurons")
    if not calibration.neurons:
        raise ConfigError(
            f"hot_neurons: {path}: it has no neuron data",
            hint="create one: octavo calibrate MODEL --text FILE --out FILE",
        )
    return {layer.weight: layer.hottest(len(layer.counts)) for layer in calibration.neurons}


def add_placeholder_thresholds(config: EngineConfig, program: Program) -> Program:
    """Returns the Program with a placeholder threshold at every gate, for planning without a
    calibration.
    """
    if not config.of(SparsityOptions).gate_sparsity:
        return program
    makers = {value: op for op in program.ops for value in op.outputs}
    gates = (get_gate_name(op, makers) for op in program.ops if isinstance(op, ActMul))
    return sparsify(program, Thresholds(gates={name: 1.0 for name in gates if name}))


def weights_name(checkpoint: Checkpoint) -> str:
    """Returns the fingerprint of a model's weights, which identifies the weights of a
    calibration.
    """
    parts = {"config": checkpoint.config}
    return fingerprint(parts, checkpoint.weight_files, cache=open_state_home()).hex()
