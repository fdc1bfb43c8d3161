"""Mistral 7B and relatives: Llama with one sliding window in every layer, or none. Jiang et al.
2023.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=8)
    window = config.window(4096)
    windows = config.layer_windows(shape.num_layers, window, lambda i: True)
    return build_llama(config, shape=shape, windows=windows)
