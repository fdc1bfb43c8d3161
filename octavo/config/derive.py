"""Fills in the options that depend on the model or the machine; returns a new config and changes
none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from octavo.config.engine_config import (
    BackendChoice,
    CacheOptions,
    EngineConfig,
    ObserveOptions,
    SchedulerOptions,
)
from octavo.config.paths import public_name
from octavo.errors import ConfigError

MIN_STALL_S = 1.0
"""Least stall_timeout, in seconds: every step reports progress several times in it."""

NUM_STEPS = 8
"""Default number of decode steps in one call; more would gain little, as Python's share of one is
already paid for by eight.
"""

BackendName = Literal["native", "torch", "reference"]

TORCH_ONLY = ("device", "attention_backend", "torch_kernels", "enforce_eager")
"""Options that mean nothing elsewhere. The other backends are batch-invariant as they are."""


def derive(
    config: EngineConfig,
    *,
    model_context_tokens: int,
    num_threads: int,
    backend: BackendName = "native",
) -> EngineConfig:
    """Returns a config with max_model_len from the model, threads and backend from the machine and
    the served name from the model's; values that were given stay.

    Raises ConfigError where options do not go together.
    """
    config = replace(
        config, backend=replace(config.backend, backend=config.backend.backend or backend)
    )
    _check(config)
    return replace(
        config,
        model=replace(
            config.model,
            max_model_len=_max_model_len(config.model.max_model_len, model_context_tokens),
            served_model_name=config.model.served_model_name or public_name(config.model.model),
        ),
        scheduler=replace(config.scheduler, num_scheduler_steps=_num_scheduler_steps(config)),
        backend=replace(
            config.backend,
            threads=config.backend.threads
            or max(1, num_threads // config.backend.tensor_parallel_size),
        ),
    )


def for_whole_texts(config: EngineConfig) -> EngineConfig:
    """Returns the config of a model that reads each text whole, in one step, and keeps no KV
    beyond it: prompts are not chunked, and no prefix of one is found again.
    """
    return replace(
        config,
        scheduler=replace(config.scheduler, enable_chunked_prefill=False),
        cache=replace(config.cache, enable_prefix_caching=False),
    )


def _num_scheduler_steps(config: EngineConfig) -> int:
    given, backend = config.scheduler.num_scheduler_steps, config.backend.backend
    if given not in (None, 1) and backend != "native":
        raise ConfigError(
            f"num_scheduler_steps: got {given}, allowed is 1 with the backend {backend}",
            hint="leave it out, or use native",
        )
    return given or (NUM_STEPS if backend == "native" else 1)


def _check(config: EngineConfig) -> None:
    """Raises ConfigError where options do not go together, or a value is out of its range."""
    _check_tenants(config.scheduler)
    _check_prefill(config.scheduler)
    _check_prefix_cache(config.cache)
    _check_observe(config.observe)
    _check_layout(config.cache)
    if config.scheduler.async_scheduling == "on" and (why := against_async_scheduling(config)):
        raise ConfigError(
            f"async_scheduling: got 'on', but {why}", hint="leave async_scheduling at auto"
        )
    _check_backend(config.backend)
    if config.model.quantization == "fp8" and config.backend.backend == "native":
        hint = "use int8, which is the more exact, or set backend to torch"
        raise ConfigError(
            "quantization: fp8 is for the torch and reference backends, got 'native'", hint=hint
        )
    _check_ranks(config)
    if not 0 < config.cache.gpu_memory_utilization <= 1:
        got = f"gpu_memory_utilization: got {config.cache.gpu_memory_utilization:g}"
        raise ConfigError(f"{got}, allowed is a share above 0 and at most 1")
    if config.scheduler.watermark >= 1:
        got = f"watermark: got {config.scheduler.watermark:g}"
        raise ConfigError(f"{got}, allowed is a share below 1")


def _check_tenants(options: SchedulerOptions) -> None:
    tenant_weights(options)
    of_tenants = options.tenant_weight or options.max_num_seqs_per_tenant is not None
    if options.scheduling_policy != "fair" and of_tenants:
        got = f"got {options.scheduling_policy!r}"
        raise ConfigError(
            f"scheduling_policy: {got}, but tenants have weights or limits",
            hint="set scheduling_policy to fair",
        )


def _check_prefill(options: SchedulerOptions) -> None:
    if options.scheduler_delay_factor and options.enable_chunked_prefill:
        raise ConfigError(
            f"scheduler_delay_factor: got {options.scheduler_delay_factor:g}, allowed is 0 with"
            " chunked prefill",
            hint="set enable_chunked_prefill to False, or leave scheduler_delay_factor out: chunks"
            " hold up no request",
        )
    if options.itl_target_ms is not None and not options.enable_chunked_prefill:
        raise ConfigError(
            f"itl_target_ms: got {options.itl_target_ms:g}, allowed only with chunked prefill",
            hint="leave enable_chunked_prefill as it is: prompts that stay whole cannot be cut to"
            " fit a time",
        )
    if options.long_prefill_token_threshold and not options.enable_chunked_prefill:
        raise ConfigError(
            "long_prefill_token_threshold: allowed only with chunked prefill",
            hint="leave enable_chunked_prefill as it is",
        )


def _check_observe(options: ObserveOptions) -> None:
    if options.record == "":
        raise ConfigError("record: got an empty name, allowed is the path of a file")
    if 0 < options.stall_timeout < MIN_STALL_S:
        raise ConfigError(
            f"stall_timeout: got {options.stall_timeout:g}, allowed is 0 (off) or at least"
            f" {MIN_STALL_S:g} second"
        )


def _check_backend(options: BackendChoice) -> None:
    usual = BackendChoice()
    given = [name for name in TORCH_ONLY if getattr(options, name) != getattr(usual, name)]
    if given and options.backend != "torch":
        raise ConfigError(
            f"{given[0]}: allowed only with the torch backend, got {options.backend!r}",
            hint="set backend to torch",
        )
    if options.cpu_level != usual.cpu_level and options.backend != "native":
        raise ConfigError(
            f"cpu_level: allowed only with the native backend, got {options.backend!r}",
            hint="set backend to native",
        )


def against_async_scheduling(config: EngineConfig) -> str:
    """Returns why no step can be planned while another is computed, whatever the device; "" where
    none of the options stands against it.
    """
    if config.backend.backend != "torch":
        return f"the {config.backend.backend} backend computes where the plans are made"
    if config.backend.tensor_parallel_size > 1:
        return "ranks (tensor_parallel_size) carry out one step at a time"
    if not config.cache.kv_cache:
        return "without the KV cache (kv_cache) a step computes again what the one before has drawn"
    if config.scheduler.scheduler_delay_factor:
        return (
            "scheduler_delay_factor counts from the end of a step with a prompt, which must have"
            " come back"
        )
    return ""


def _check_ranks(config: EngineConfig) -> None:
    num_ranks = config.backend.tensor_parallel_size
    if num_ranks == 1:
        return
    if config.backend.backend != "torch":
        what = (
            f"tensor_parallel_size: got {num_ranks}, allowed only with the torch backend, got"
            f" {config.backend.backend!r}"
        )
        raise ConfigError(what, hint="set backend to torch, or leave tensor_parallel_size at 1")
    for name in ("prefix_cache_dir", "kv_offloading_size"):
        if getattr(config.cache, name) is not None:
            what = f"{name}: allowed only where tensor_parallel_size is 1, got {num_ranks}"
            raise ConfigError(what, hint=f"leave out {name}, or leave tensor_parallel_size at 1")


def _check_prefix_cache(cache: CacheOptions) -> None:
    for name in ("prefix_cache_dir", "kv_offloading_size"):
        if getattr(cache, name) is not None and not (
            cache.enable_prefix_caching and cache.kv_cache
        ):
            raise ConfigError(f"{name}: allowed only where the KV cache and prefix caching are on")


def _check_layout(cache: CacheOptions) -> None:
    if cache.kv_layout == "virtual" and cache.enable_prefix_caching:
        what = (
            "kv_layout: virtual gives each request addresses of its own, prefix caching needs"
            " shared blocks"
        )
        raise ConfigError(
            what, hint="set enable_prefix_caching to False, or leave kv_layout at paged"
        )


def tenant_weights(options: SchedulerOptions) -> dict[str, float]:
    """Parses the options "NAME=WEIGHT"; returns the weights by name."""
    weights = {}
    for text in options.tenant_weight:
        name, _, weight = text.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = 0.0
        if not name or not 0 < weights[name] < math.inf:
            raise ConfigError(
                f"tenant_weight: got {text!r}, allowed is NAME=WEIGHT with a number above 0, such"
                " as alice=2"
            )
    return weights


def _max_model_len(wanted: int | None, model_context_tokens: int) -> int:
    if wanted is None:
        return model_context_tokens
    if wanted > model_context_tokens:
        raise ConfigError(
            f"max_model_len: got {wanted}, allowed is at most the model's context,"
            f" {model_context_tokens}"
        )
    if wanted < 2:
        raise ConfigError(
            f"max_model_len: got {wanted}, allowed is at least 2 (one prompt token, one new one)"
        )
    return wanted
