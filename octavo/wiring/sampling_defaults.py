"""Chooses a model's sampling defaults: its generation_config, the catalogue's values, or values for
its kind of model.

They apply to requests without temperature, top_p, repetition penalty or max_tokens.
`--generation-config` selects a different source, `--override-generation-config` overrides
individual values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.api.errors import ConfigError
from octavo.checkpoint.catalogue import recommended_sampling
from octavo.checkpoint.json_file import read_json
from octavo.checkpoint.ports import Checkpoint
from octavo.config.model_options import ModelOptions
from octavo.config.paths import expand_path
from octavo.frontend.sampling_defaults import NAMES, SAMPLED, SamplingDefaults

CHAT = {**SAMPLED, "repetition_penalty": 1.05}
"""Values for chat models without recommended values: between llama.cpp's temperature of 0.8 with
top_p 0.95 and the 0.6 to 0.7 that most instruct models recommend.
"""
BASE = {**CHAT, "repetition_penalty": 1.1, "max_new_tokens": 256}
"""Values for base models, which rarely end a text and tend to repeat themselves."""
ENCODER_DECODER = {"temperature": 0.0}
"""Values for translation and transcription: greedy."""
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""A generation_config with any of these keys recommends sampling values."""


def sampling_defaults(
    options: ModelOptions, checkpoint: Checkpoint, *, has_chat_template: bool, has_encoder: bool
) -> SamplingDefaults:
    """Returns the default sampling values of requests."""
    values, source = _values(
        options, checkpoint, has_chat_template=has_chat_template, has_encoder=has_encoder
    )
    overrides = _overrides(options.override_generation_config)
    is_given = "max_new_tokens" in {**checkpoint.generation_config, **overrides}
    if overrides:
        source += ", --override-generation-config"
    return SamplingDefaults.from_generation_config(
        {**values, **overrides},
        source,
        limits_chats_only=options.generation_config == "auto" and not is_given,
    )


def _values(
    options: ModelOptions, checkpoint: Checkpoint, *, has_chat_template: bool, has_encoder: bool
) -> tuple[Mapping[str, Any], str]:
    """Returns a generation_config and its source."""
    if options.generation_config == "vllm":
        return {}, "--generation-config vllm"
    if options.generation_config != "auto":
        path = expand_path(options.generation_config)
        path = path / "generation_config.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"generation_config: got {options.generation_config!r}, expected auto, vllm, or"
                " the path of a generation_config.json or its directory"
            )
        return read_json(path), path.name
    own = checkpoint.generation_config
    if any(own.get(key) is not None for key in SAMPLING_KEYS):
        is_gguf = checkpoint.path.suffix == ".gguf"
        return own, "general.sampling of the GGUF file" if is_gguf else "generation_config.json"
    catalogued = recommended_sampling(checkpoint.path)
    if catalogued is not None:
        name, values = catalogued
        return {**own, **values}, f"recommended for {name}"
    if has_encoder:
        return {**ENCODER_DECODER, **own}, "the model recommends no values: greedy"
    kind = "chat" if has_chat_template else "base"
    return {
        **(CHAT if has_chat_template else BASE),
        **own,
    }, f"the model recommends no values: {kind}"


def _overrides(text: str | None) -> dict[str, Any]:
    """Parses --override-generation-config; raises ConfigError if it is not a JSON object of
    sampling values.
    """
    try:
        overrides = json.loads(text) if text else {}
    except ValueError:
        overrides = None
    if not isinstance(overrides, dict) or not overrides.keys() <= NAMES.keys():
        raise ConfigError(
            f"override_generation_config: got {text!r}, expected a JSON object with"
            f" {', '.join(NAMES)}",
            hint="""for example '{"temperature": 0.6, "top_p": 0.9}'""",
        )
    return overrides
