"""Command R7B and Command A: Command R with sliding windows in three of four layers and RoPE only
in these layers. Cohere 2024.
"""

from __future__ import annotations

from octavo.models.cohere import build_cohere, read_shape
from octavo.models.hf_config import HfConfig
from octavo.models.rope import rope_parameters
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = read_shape(config)
    config.refuse_unless("position_embedding_type", "rope_gptj")
    config.refuse_unless("rotary_pct", 1, 1.0)
    config.refuse_unless("order_of_interleaved_layers", "local_attn_first")
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        config.refuse_unless(name, True)
    config.without_effect("use_parallel_embedding")
    pattern = config.integer(
        "sliding_window_pattern", config.integer("_sliding_window_pattern", 4), low=1
    )
    windows = config.layer_windows(
        shape.num_layers, config.window(4096), lambda i: (i + 1) % pattern != 0
    )
    rope = rope_parameters(config, default_theta=10_000.0).table(shape.head_dim)
    ropes = [None if window is None else rope for window in windows]
    return build_cohere(config, shape, windows, ropes)
