"""Gemma 4 12B, which embeds patches and sound without towers; only text is supported."""

from __future__ import annotations

from octavo.models import gemma4_text
from octavo.models.config_keys import TOWERS
from octavo.models.hf_config import HfConfig
from octavo.program.program import Program


def build(config: HfConfig) -> dict[str, Program]:
    config.without_effect(*TOWERS)
    return gemma4_text.build(config)
