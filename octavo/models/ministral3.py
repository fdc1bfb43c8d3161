"""Ministral 3: Mistral with YaRN, whose queries grow with their position. Mistral AI 2025."""

from __future__ import annotations

from octavo.models.decoder import DecoderShape, query_growth
from octavo.models.hf_config import HfConfig
from octavo.models.llama import build_llama
from octavo.program.program import Growth, Program


def build(config: HfConfig) -> dict[str, Program]:
    shape = DecoderShape.read(config, head_dim=128, norm_eps=1e-5)
    window = config.optional_integer("sliding_window")
    windows = config.layer_windows(shape.num_layers, window, lambda i: True)
    positions = config.integer("max_position_embeddings", low=1)
    rope = HfConfig({**config.table("rope_parameters"), **config.table("rope_scaling")})
    slope = rope.optional_number("llama_4_scaling_beta") or 0.0
    original = "original_max_position_embeddings"
    given = rope if rope.values.get(original) is not None else config
    growth = query_growth(positions, Growth(given.integer(original, positions, low=1), slope))
    return build_llama(config, shape=shape, windows=windows, theta=1_000_000.0, growth=growth)
