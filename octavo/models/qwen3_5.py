"""Qwen3.5 with images: Qwen3-VL's tower without DeepStack. Qwen team 2026."""

from __future__ import annotations

from octavo.models import qwen3_5_text
from octavo.models.config_keys import TOWERS
from octavo.models.decoder import PredictionLayer
from octavo.models.hf_config import HfConfig
from octavo.models.qwen3_vl import build_tower
from octavo.models.qwen3_vl import table_layout as image_layout
from octavo.program.program import Program

__all__ = ["build", "image_layout", "prediction_layer"]


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect(*TOWERS)
    decoder = qwen3_5_text.build(config, has_images=True)
    return {**decoder, **build_tower(config, has_deep_rows=False)}


def prediction_layer(config: HfConfig) -> PredictionLayer:
    """Returns the multi-token-prediction layer."""
    return qwen3_5_text.prediction_layer(config, has_images=True)
