"""Fills in the options that depend on the model or the machine; returns a new config and changes none."""

from __future__ import annotations

from dataclasses import replace

from octavo.config.engine_config import EngineConfig
from octavo.errors import ConfigError


def derive(config: EngineConfig, *, model_context_tokens: int, num_threads: int) -> EngineConfig:
    """max_model_len from the model, threads from the machine, the served name from the model's; what was given stays."""
    return replace(
        config,
        model=replace(
            config.model,
            max_model_len=_max_model_len(config.model.max_model_len, model_context_tokens),
            served_model_name=config.model.served_model_name or config.model.model,
        ),
        backend=replace(config.backend, threads=config.backend.threads or num_threads),
    )


def _max_model_len(wanted: int | None, model_context_tokens: int) -> int:
    if wanted is None:
        return model_context_tokens
    if wanted > model_context_tokens:
        raise ConfigError(f"max_model_len: got {wanted}, allowed is at most the model's context, {model_context_tokens}")
    if wanted < 2:
        raise ConfigError(f"max_model_len: got {wanted}, allowed is at least 2 (one prompt token, one new one)")
    return wanted
