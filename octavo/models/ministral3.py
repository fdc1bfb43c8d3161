"""Ministral 3: Mistral with YaRN. Its queries grow with the logarithm of their position from
original_max_position_embeddings on, where the context ends here (`hf_config.exact_context`).
Mistral AI 2025.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, head_dim=128, norm_eps=1e-5)
    window = config.optional_integer("sliding_window")
    windows = config.layer_windows(shape.num_layers, window, lambda i: True)
    return build_llama(config, shape=shape, windows=windows, theta=1_000_000.0)
