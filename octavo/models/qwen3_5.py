"""Qwen3.5 checkpoints with a vision tower; only text is supported."""

from __future__ import annotations

from octavo.models import qwen3_5_text
from octavo.models.config_keys import TOWERS
from octavo.models.hf_config import HfConfig
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect(*TOWERS)
    return qwen3_5_text.build(config)
