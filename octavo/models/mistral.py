"""Mistral 7B and its line: Llama with one sliding window in every layer, or none. Jiang et al.
2023.
"""

from __future__ import annotations

from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    window = config.optional_integer("sliding_window")
    return build_llama(
        config,
        windows=config.layer_windows(config.count("num_hidden_layers"), window, lambda i: True),
    )
