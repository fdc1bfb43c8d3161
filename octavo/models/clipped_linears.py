"""Linear layers with clipped inputs and outputs, as in the towers of Gemma 4."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.gemma_parts import add_constant
from octavo.models.hf_config import HfConfig
from octavo.program.builder import Builder
from octavo.program.program import Value


@dataclass(frozen=True, slots=True)
class ClippedLinears:
    """Bounds of the inputs and outputs of linear layers, which the checkpoint's files contain."""

    bounds: dict[str, list[float]]
    """Lowest and highest input, lowest and highest output, by module."""

    @staticmethod
    def read(config: HfConfig, part: HfConfig) -> ClippedLinears:
        bounds = config.table("clip_bounds")  # checkpoints add this key
        return ClippedLinears(bounds if part.flag("use_clipped_linears", False) else {})

    def linear(self, b: Builder, x: Value, name: str, width: int) -> Value:
        """Appends a linear layer with clipped inputs and outputs."""
        low, high, least, most = self.bounds.get(name, [-math.inf, math.inf] * 2)
        out = b.linear(_clip(b, x, low, high), f"{name}.linear", width)
        return _clip(b, out, least, most)


def _clip(b: Builder, x: Value, low: float, high: float) -> Value:
    """Limits x to a range, which may have no bounds."""
    if (low, high) == (-math.inf, math.inf):
        return x
    if not low < high < math.inf or low == -math.inf:
        raise UnsupportedModel(
            f"model.safetensors: bounds of a linear layer are {low} and {high}, expected two"
            " finite numbers in ascending order"
        )
    middle = (low + high) / 2
    clipped = b.clip(add_constant(b, x, -middle), (high - low) / 2)
    return add_constant(b, clipped, middle)
