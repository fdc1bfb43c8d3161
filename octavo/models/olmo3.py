"""OLMo 3: OLMo 2 with sliding windows in three of four layers; the RoPE of these layers is never
scaled. OLMo team 2025.
"""

from __future__ import annotations

from octavo.models.decoder import AFTER_ONLY, DecoderShape, Frame
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.rope import tables_by_layer_type
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, norm_eps=1e-5)
    windows = config.layer_windows(
        shape.num_layers, config.window(4096), lambda i: (i + 1) % 4 != 0
    )
    theta = config.number("rope_theta", 500_000.0)
    sliding, full = tables_by_layer_type(
        config, shape.head_dim, sliding_theta=theta, full_theta=theta
    )
    bias = config.flag("attention_bias", False)
    return build_llama(
        config,
        shape=shape,
        windows=windows,
        ropes=[full if window is None else sliding for window in windows],
        qkv_bias=bias,
        out_bias=bias,
        row_norms=True,
        frame=Frame(norms=AFTER_ONLY),
    )
