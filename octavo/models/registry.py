"""Builds the Programs of a config, by the module of its model_type, which is imported on demand."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from octavo.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.program.program import Program

FAMILIES = (
    "bert",
    "bloom",
    "chatglm",
    "cohere",
    "cohere2",
    "deepseek_v3",
    "distilbert",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "internlm3",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "mpnet",
    "mpt",
    "nemotron",
    "nomic_bert",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "t5",
    "xlm-roberta",
)
"""Supported values of Hugging Face's model_type, each the name of a module here with _ for -."""


def check_family(config: Mapping[str, Any]) -> None:
    """Refuses an unknown model_type, whose config would be misread whatever else it says."""
    model_type = HfConfig(config).model_type
    if model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model type {model_type!r} is not supported", hint="known are " + ", ".join(FAMILIES)
        )


def _module(model_type: str) -> Any:
    return import_module(f"octavo.models.{model_type.replace('-', '_')}")


def build_programs(config: Mapping[str, Any]) -> dict[str, Program]:
    """Builds the Programs of a model by name: "decoder" and, where the family has one, "encoder".

    `config` is config.json as it stands. Programs that keep K and V declare the same cache groups
    in the same order.
    """
    check_family(config)
    hf = HfConfig(config)
    programs: dict[str, Program] = _module(hf.model_type).build(hf)
    return programs
