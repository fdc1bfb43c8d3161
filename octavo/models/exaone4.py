"""EXAONE 4: post-norm only, head norms, sliding-window layers with RoPE and full layers without. LG
AI Research 2025.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.models.decoder import AFTER_ONLY, DecoderShape, Frame
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.rope import rope_parameters
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=32, norm_eps=1e-5)
    window = config.window(4096)
    config.without_effect("sliding_window_pattern")  # without a window
    windows = config.layer_windows(
        shape.num_layers, window, make_window_pattern(config) if window else lambda i: False
    )
    rope = rope_parameters(config).table(shape.head_dim)
    return build_llama(
        config,
        shape=shape,
        windows=windows,
        ropes=[rope if window is None or seen else None for seen in windows],
        head_norms=True,
        frame=Frame(norms=AFTER_ONLY),
    )


def make_window_pattern(config: HfConfig) -> Callable[[int], bool]:
    """Returns which layers have a window, by `sliding_window_pattern`: a period, or a string such
    as LLLG with a letter per layer.
    """
    pattern = config.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern:
        return lambda i: pattern[i % len(pattern)] == "L"
    period = config.integer("sliding_window_pattern", 4, low=1)
    return lambda i: (i + 1) % period != 0
