"""Fills in the options that depend on the model or the machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from octavo.api.errors import ConfigError
from octavo.config.checks import check
from octavo.config.config_hooks import config_hooks
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import public_name

BackendName = Literal["native", "torch", "reference"]

NUM_STEPS = 8
"""Default number of decode steps per call. With eight steps, Python's overhead is negligible."""

LOGGED_ONLY = '{"enable_kv_cache_events": true, "publisher": "null"}'
"""Value of kv_events_config for engines whose own frontend reads the block events."""


def derive(
    config: EngineConfig,
    *,
    model_context_tokens: int,
    num_threads: int,
    backend: BackendName = "native",
) -> EngineConfig:
    """Fills in max_model_len from the model, threads and backend from the machine, and the served
    name. Options that are already set are unchanged. Raises ConfigError if options conflict.
    """
    config = replace(
        config, backend=replace(config.backend, backend=config.backend.backend or backend)
    )
    check(config)
    for hooks in config_hooks():
        config = hooks.derive(config)
    return replace(
        config,
        model=replace(
            config.model,
            max_model_len=_max_model_len(config.model.max_model_len, model_context_tokens),
            served_model_name=config.model.served_model_name or public_name(config.model.model),
        ),
        scheduler=replace(
            config.scheduler,
            num_scheduler_steps=_num_scheduler_steps(config),
        ),
        backend=replace(
            config.backend,
            threads=config.backend.threads or max(1, num_threads // _num_processes(config)),
        ),
    )


def _max_model_len(requested: int | None, model_context_tokens: int) -> int:
    if requested is None:
        return model_context_tokens
    if requested > model_context_tokens:
        raise ConfigError(
            f"max_model_len: got {requested}, expected at most the model's context,"
            f" {model_context_tokens}",
            hint="see docs/guides/long-context.md for how to extend the context",
        )
    if requested < 2:
        raise ConfigError(
            f"max_model_len: got {requested}, expected at least 2 (one prompt token and one output"
            " token)"
        )
    return requested


def _num_processes(config: EngineConfig) -> int:
    """Number of processes that share the machine's threads."""
    return config.backend.num_ranks * config.fleet.data_parallel_size


def _num_scheduler_steps(config: EngineConfig) -> int:
    num_steps, backend = config.scheduler.num_scheduler_steps, config.backend.backend
    if num_steps not in (None, 1) and backend != "native":
        raise ConfigError(
            f"num_scheduler_steps: got {num_steps}, expected 1 with the backend {backend}",
            hint="remove it, or use native",
        )
    if num_steps not in (None, 1) and config.backend.num_ranks > 1:
        name, size = _parallel_size(config)
        raise ConfigError(
            f"num_scheduler_steps: got {num_steps}, expected 1 with {name} {size}",
            hint="remove it: multi-step decoding requires a single rank",
        )
    if num_steps not in (None, 1) and config.fleet.num_expert_engines > 1:
        raise ConfigError(
            f"num_scheduler_steps: got {num_steps}, expected 1 with enable_expert_parallel",
            hint="remove it: engines with expert parallelism synchronize at each step",
        )
    is_alone = config.backend.num_ranks == config.fleet.num_expert_engines == 1
    is_several = backend == "native" and is_alone
    return num_steps or (NUM_STEPS if is_several else 1)


def _parallel_size(config: EngineConfig) -> tuple[str, int]:
    """Returns the option that splits the model over processes, and its value."""
    backend = config.backend
    if backend.num_stage_ranks > 1:
        return backend.rank_option
    return "pipeline_parallel_size", backend.pipeline_parallel_size
