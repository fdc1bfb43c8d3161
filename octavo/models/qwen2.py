"""Qwen1.5, Qwen2 and Qwen2.5: Llama with biases on q, k and v, and optional windows in the upper
layers. Qwen team 2024.
"""

from __future__ import annotations

from octavo.models.decoder import DecoderShape
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=32)
    return build_llama(config, shape=shape, windows=upper_windows(config), qkv_bias=True)


def upper_windows(config: HfConfig) -> tuple[int | None, ...]:
    """Returns windows for layers from max_window_layers on, if use_sliding_window is set."""
    window = config.window(4096) if config.flag("use_sliding_window", False) else None
    config.without_effect("sliding_window")
    first = config.integer("max_window_layers", 28)
    return config.layer_windows(config.count("num_hidden_layers"), window, lambda i: i >= first)
