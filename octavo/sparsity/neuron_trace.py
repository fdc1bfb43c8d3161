"""Records which neurons of a model are active in a text, for simulations of other machines."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.config.engine_config import EngineConfig
from octavo.program.ops import ActMul
from octavo.sparsity.calibrate import WINDOW, measure_text
from octavo.utils.progress import Report


@dataclass(frozen=True, slots=True)
class NeuronTrace:
    """The neurons of gated feed-forward layers that were active, token by token."""

    tokens: list[list[list[int]]]
    """Active neurons of each layer of each token, by number."""
    num_neurons: int
    """Neurons of a layer."""
    inputs: int
    """Numbers that a neuron's gate and up rows read, and that its down column writes."""


def record_neurons(
    config: EngineConfig, text: str, *, num_tokens: int, share: float, report: Report
) -> NeuronTrace:
    """Runs a text through a model; a neuron is active where its gate is among the `share` of the
    layer's that are widest open.
    """
    seen = measure_text(config, text, num_tokens=num_tokens, report=report)
    gates = [op for op in seen.program.ops if isinstance(op, ActMul)]
    makers = {value: op for op in seen.program.ops for value in op.outputs}
    widths = {(op.out.width, makers[op.gate].inputs[0].width) for op in gates}
    if len(widths) != 1:
        raise UnsupportedModel(
            f"{config.model.model} has {len(widths)} widths of gated feed-forward layers; a trace"
            " is of layers that are alike"
        )
    ((num_neurons, inputs),) = widths
    tokens: list[list[list[int]]] = []
    for _ in seen.windows:
        layers = [rows.tolist() for rows in seen.meter.strongest(WINDOW, share)]
        tokens += [list(token) for token in zip(*layers, strict=True)]
    return NeuronTrace(tokens, num_neurons, inputs)
