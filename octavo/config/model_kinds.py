"""Adjusts options to the kind of model: encoder, encoder-decoder, recurrent states."""

from __future__ import annotations

from dataclasses import replace

from octavo.api.errors import ConfigError
from octavo.config.config_hooks import store_option, transfer_option
from octavo.config.engine_config import EngineConfig
from octavo.config.scheduler_options import PROGRAM_METHODS

NOT_FOR_ENCODERS = (
    "kv_cache",
    "kv_layout",
    "prefix_cache_dir",
    "kv_offloading_size",
    "tensor_parallel_size",
    "expert_parallel_size",
    "pipeline_parallel_size",
    "weights_memory_bytes",
    "enable_lora",
)
"""Options that a decoder behind an encoder does not support."""


def configure_encoder(config: EngineConfig) -> EngineConfig:
    """Returns the config for an encoder: each text is computed in a single step, without chunked
    prefill and prefix caching.
    """
    return replace(
        config,
        scheduler=replace(config.scheduler, enable_chunked_prefill=False),
        cache=replace(config.cache, enable_prefix_caching=False),
    )


def configure_encoder_decoder(config: EngineConfig, max_input_len: int) -> EngineConfig:
    """Returns the config for an encoder-decoder whose longest input has `max_input_len` rows: each
    input is encoded in a single step, without prefix caching.

    Raises ConfigError for options that such a model does not support.
    """
    options, defaults = config.to_options(), EngineConfig().to_options()
    for name in filter(None, (*NOT_FOR_ENCODERS, store_option(config), transfer_option(config))):
        if options[name] != defaults[name]:
            raise ConfigError(
                f"{name}: got {options[name]}, but the model is an encoder-decoder;"
                f" expected {defaults[name]}",
                hint=f"remove {name}",
            )
    method = config.scheduler.spec_method
    if method in PROGRAM_METHODS or config.model.quantization == "int4":
        name = "spec_method" if method in PROGRAM_METHODS else "quantization"
        raise ConfigError(
            f"{name}: got {method if name == 'spec_method' else 'int4'}, which requires a"
            f" decoder-only model; this model is an encoder-decoder",
            hint=f"remove {name}",
        )
    requested_len = config.model.max_encoder_len
    if requested_len is not None and requested_len > max_input_len:
        raise ConfigError(
            f"max_encoder_len: got {requested_len}, expected at most {max_input_len}, the"
            " model's limit",
            hint="remove max_encoder_len",
        )
    max_encoder_len = requested_len or max_input_len
    if config.scheduler.max_num_batched_tokens <= max_encoder_len:
        raise ConfigError(
            f"max_num_batched_tokens: got {config.scheduler.max_num_batched_tokens}, but an input"
            f" of {max_encoder_len} tokens is encoded in one step, followed by a decoder token",
            hint=f"raise it to {max_encoder_len + 1}, or lower max_encoder_len",
        )
    return replace(
        config,
        model=replace(config.model, max_encoder_len=max_encoder_len),
        cache=replace(config.cache, enable_prefix_caching=False),
    )
