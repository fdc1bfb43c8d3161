"""OLMo 3: OLMo 2 with a window in three of four layers, whose rope is never scaled. OLMo team
2025.
"""

from __future__ import annotations

from octavo.models.decoder import AFTER_ONLY, DecoderShape, Frame
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.models.rope import RopeParameters
from octavo.program.ops import RopeTable
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, norm_eps=1e-5)
    windows = config.layer_windows(
        shape.num_layers, config.integer("sliding_window", 4096), lambda i: (i + 1) % 4 != 0
    )
    sliding, full = rope_tables(config, shape.head_dim)
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


def rope_tables(config: HfConfig, head_dim: int) -> tuple[RopeTable, RopeTable]:
    """Returns the tables of sliding and full layers; configs of before transformers 5 keep one set
    of scaling parameters, which is the full layers'.
    """
    by_type = config.table("rope_parameters")
    sliding = by_type.get("sliding_attention") or {}
    full = {**(by_type.get("full_attention") or {}), **config.table("rope_scaling")}
    theta = config.number("rope_theta", 500_000.0)
    positions = config.integer("max_position_embeddings", low=1)
    return (
        RopeParameters(sliding, theta=theta, max_positions=positions).table(head_dim),
        RopeParameters(full, theta=theta, max_positions=positions).table(head_dim),
    )
