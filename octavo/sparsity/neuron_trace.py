"""Records the active neurons of a model on a text, for simulations."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.config.engine_config import EngineConfig
from octavo.program.ops import ActMul
from octavo.sparsity.calibrate import WINDOW, measure_text
from octavo.utils.progress import Report


@dataclass(frozen=True, slots=True)
class NeuronTrace:
    """Active neurons of gated feed-forward layers, token by token."""

    tokens: list[list[list[int]]]
    """Active neuron indices, `[tokens][layers]`."""
    num_neurons: int
    """Neurons per layer."""
    inputs: int
    """Inputs of a neuron's gate and up rows; also the outputs of its down column."""


def record_neurons(
    config: EngineConfig, text: str, *, num_tokens: int, share: float, report: Report
) -> NeuronTrace:
    """Runs a text through a model. A neuron is active if its gate is among the largest fraction
    `share` of the layer.
    """
    seen = measure_text(config, text, num_tokens=num_tokens, report=report)
    gates = [op for op in seen.program.ops if isinstance(op, ActMul)]
    makers = {value: op for op in seen.program.ops for value in op.outputs}
    widths = {(op.out.width, makers[op.gate].inputs[0].width) for op in gates}
    if len(widths) != 1:
        raise UnsupportedModel(
            f"{config.model.model} has gated feed-forward layers of {len(widths)} sizes, expected"
            " one size",
            hint="name a model whose layers have equal sizes",
        )
    ((num_neurons, inputs),) = widths
    tokens: list[list[list[int]]] = []
    for _ in seen.windows:
        layers = [rows.tolist() for rows in seen.meter.strongest(WINDOW, share)]
        tokens += [list(token) for token in zip(*layers, strict=True)]
    return NeuronTrace(tokens, num_neurons, inputs)
