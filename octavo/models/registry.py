"""From a config to its Programs: the module of each model_type, imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from octavo.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.program.program import Program

FAMILIES = (
    "deepseek_v3",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "llama",
    "mistral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "t5",
)
"""Hugging Face's model_type, which is also the module's name here."""


def check_family(config: Mapping[str, Any]) -> None:
    """UnsupportedModel where nobody here knows its model_type: whatever else its config says would
    be misread.
    """
    model_type = HfConfig(config).model_type
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model type {model_type!r} is not supported", hint="known are " + ", ".join(FAMILIES)
        )


def build_programs(config: Mapping[str, Any]) -> dict[str, Program]:
    """ "decoder" and, where the family has one, "encoder". `config` is config.json as it stands."""
    check_family(config)
    hf = HfConfig(config)
    programs: dict[str, Program] = import_module(f"octavo.models.{hf.model_type}").build(hf)
    return programs
