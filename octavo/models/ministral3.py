"""Ministral 3: Mistral with YaRN and query scaling by position. Mistral AI 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, query_growth
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Growth, Program

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, num_kv_heads=8, head_dim=128, norm_eps=1e-5)
    window = config.optional_integer("sliding_window")
    windows = config.layer_windows(shape.num_layers, window, lambda i: True)
    positions = config.integer("max_position_embeddings", low=1)
    if not (config.table("rope_parameters") or config.table("rope_scaling")):
        config = config.with_values(rope_parameters=DEFAULT_ROPE)
    rope = HfConfig({**config.table("rope_parameters"), **config.table("rope_scaling")})
    slope = rope.optional_number("llama_4_scaling_beta") or 0.0
    original = "original_max_position_embeddings"
    given = rope if config.values.get(original) is None else config
    growth = query_growth(positions, Growth(given.integer(original, positions, low=1), slope))
    return build_llama(config, shape=shape, windows=windows, theta=1_000_000.0, growth=growth)
