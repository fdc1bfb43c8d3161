"""Checks of option ranges and of conflicts between options."""

from __future__ import annotations

import math

from octavo.api.errors import ConfigError
from octavo.config.backend_checks import check_backend
from octavo.config.cache_options import CacheOptions
from octavo.config.config_hooks import config_hooks
from octavo.config.engine_config import EngineConfig
from octavo.config.scheduler_options import PROGRAM_METHODS, ObserveOptions, SchedulerOptions

MIN_STALL_S = 1.0
"""Minimum of stall_timeout; within this time, steps report progress several times."""

MAX_LORA_RANK = 1024

MAX_TREE_WIDTH = 8
"""Maximum number of branches of a draft tree; each branch copies a block in every layer."""


def check(config: EngineConfig) -> None:
    """Raises ConfigError if a value is out of range or options conflict."""
    _check_tenants(config.scheduler)
    _check_priority_function(config.scheduler)
    _check_prefill(config.scheduler)
    _check_prefix_cache(config.cache)
    _check_observe(config.observe)
    _check_layout(config.cache)
    if config.scheduler.async_scheduling == "on" and (why := get_async_scheduling_conflict(config)):
        raise ConfigError(
            f"async_scheduling: got 'on', but {why}", hint="set async_scheduling to auto"
        )
    for hooks in config_hooks():
        hooks.check(config)
    check_backend(config)
    if not 0 < config.cache.gpu_memory_utilization <= 1:
        given_utilization = f"gpu_memory_utilization: got {config.cache.gpu_memory_utilization:g}"
        raise ConfigError(f"{given_utilization}, expected a fraction above 0 and at most 1")
    if config.scheduler.watermark >= 1:
        given_utilization = f"watermark: got {config.scheduler.watermark:g}"
        raise ConfigError(f"{given_utilization}, expected a fraction below 1")
    _check_adapters(config)
    _check_sampler(config)
    _check_speculation(config)


def _check_tenants(options: SchedulerOptions) -> None:
    tenant_weights(options)
    of_tenants = options.tenant_weight or options.max_num_seqs_per_tenant is not None
    if options.scheduling_policy != "fair" and of_tenants:
        given = f"got {options.scheduling_policy!r}"
        raise ConfigError(
            f"scheduling_policy: {given},"
            " but tenant_weight and max_num_seqs_per_tenant require fair",
            hint="set scheduling_policy to fair",
        )


def _check_priority_function(options: SchedulerOptions) -> None:
    name = options.priority_function
    if name is None:
        return
    module, _, function = name.partition(":")
    if not (module and function):
        raise ConfigError(
            f"priority_function: got {name!r}, expected MODULE:FUNCTION",
            hint="for example my_module:get_priority",
        )
    if options.scheduling_policy != "priority":
        raise ConfigError(
            f"priority_function: not allowed with scheduling_policy {options.scheduling_policy!r}",
            hint="set scheduling_policy to priority",
        )


def _check_prefill(options: SchedulerOptions) -> None:
    if options.scheduler_delay_factor and options.enable_chunked_prefill:
        raise ConfigError(
            f"scheduler_delay_factor: got {options.scheduler_delay_factor:g}, expected 0 with"
            " chunked prefill",
            hint="set enable_chunked_prefill to False, or remove scheduler_delay_factor: chunked"
            " prefill does not delay other requests",
        )
    if options.itl_target_ms is not None and not options.enable_chunked_prefill:
        raise ConfigError(
            f"itl_target_ms: got {options.itl_target_ms:g}, requires chunked prefill",
            hint="set enable_chunked_prefill to True: only chunked prompts can be sized to a time"
            " limit",
        )
    if options.long_prefill_token_threshold and not options.enable_chunked_prefill:
        raise ConfigError(
            "long_prefill_token_threshold: requires chunked prefill",
            hint="set enable_chunked_prefill to True",
        )


def _check_observe(options: ObserveOptions) -> None:
    if options.record == "":
        raise ConfigError("record: got an empty name, expected the path of a file")
    if 0 < options.stall_timeout < MIN_STALL_S:
        raise ConfigError(
            f"stall_timeout: got {options.stall_timeout:g}, expected 0 (off) or at least"
            f" {MIN_STALL_S:g} second"
        )


def _check_prefix_cache(cache: CacheOptions) -> None:
    for name in ("prefix_cache_dir", "kv_offloading_size"):
        if getattr(cache, name) is not None and not (
            cache.enable_prefix_caching and cache.kv_cache
        ):
            raise ConfigError(
                f"{name}: requires kv_cache and enable_prefix_caching",
                hint="remove --no-kv-cache and --no-enable-prefix-caching",
            )


def _check_layout(cache: CacheOptions) -> None:
    if cache.kv_layout == "virtual" and cache.enable_prefix_caching:
        what = "kv_layout: virtual is not supported with enable_prefix_caching"
        raise ConfigError(
            what, hint="set enable_prefix_caching to False, or set kv_layout to paged"
        )


def _check_adapters(config: EngineConfig) -> None:
    lora = config.lora
    if not lora.enable_lora:
        return
    if lora.max_lora_rank > MAX_LORA_RANK:
        raise ConfigError(
            f"max_lora_rank: got {lora.max_lora_rank}, expected at most {MAX_LORA_RANK}"
        )
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        raise ConfigError(
            f"max_cpu_loras: got {lora.max_cpu_loras}, expected at least max_loras,"
            f" {lora.max_loras}",
            hint="raise max_cpu_loras, or lower max_loras",
        )
    if config.backend.expert_parallel_size > 1:
        raise ConfigError(
            "enable_lora: not supported with expert_parallel_size"
            f" {config.backend.expert_parallel_size}",
            hint="use --tensor-parallel-size instead, or merge the adapter into the model",
        )


def _check_sampler(config: EngineConfig) -> None:
    sampler = config.sampler
    set_options = {
        "logits_processors": sampler.processors,
        "structured_close": sampler.structured_close,
    }
    for name, value in set_options.items():
        if value and config.backend.backend == "torch":
            raise ConfigError(
                f"{name}: requires the native or reference backend, got 'torch'",
                hint=f"set backend to native, or remove {name}",
            )


def _check_speculation(config: EngineConfig) -> None:
    options = config.scheduler
    takes_model = options.spec_method in ("draft_model", "eagle3")
    if takes_model != (options.spec_model is not None) and options.spec_method != "mtp":
        raise ConfigError(
            f"spec_model: got {options.spec_model} with spec_method {options.spec_method}, expected"
            f" {'a model' if options.spec_model is None else 'none'}",
            hint="set spec_model with spec_method draft_model, eagle3 or mtp, else remove it",
        )
    if options.spec_history and options.spec_method not in ("suffix", "auto"):
        raise ConfigError(
            f"spec_history: requires spec_method suffix or auto, got {options.spec_method}",
            hint="remove spec_history, or use --spec-method suffix",
        )
    if options.spec_tree_width > 1:
        _check_trees(config)
    if options.spec_method not in PROGRAM_METHODS:
        return
    others = {
        "weights_memory_bytes": config.offload.weights_memory_bytes is not None,
        "kv_cache": not config.cache.kv_cache,
    }
    for name, is_given in others.items():
        if is_given:
            raise ConfigError(
                f"spec_method: got {options.spec_method}, not supported with {name}",
                hint=f"remove {name} or spec_method",
            )


def _check_trees(config: EngineConfig) -> None:
    """Raises ConfigError if the options do not support draft trees."""
    width, backend = config.scheduler.spec_tree_width, config.backend
    if width > MAX_TREE_WIDTH:
        raise ConfigError(f"spec_tree_width: got {width}, expected at most {MAX_TREE_WIDTH}")
    against = {
        "without spec_method": not config.scheduler.uses_speculation,
        f"with {backend.rank_option[0]}": backend.num_stage_ranks > 1,
        "with kv_layout virtual": config.cache.kv_layout == "virtual",
        "without a kv_cache": not config.cache.kv_cache,
    }
    for where, is_so in against.items():
        if is_so:
            raise ConfigError(
                f"spec_tree_width: got {width}, expected 1 {where}",
                hint="remove spec_tree_width",
            )


def get_async_scheduling_conflict(config: EngineConfig) -> str:
    """Returns the reason why async scheduling is impossible with these options on any device; "" if
    it is possible.
    """
    if config.backend.backend != "torch":
        return f"the {config.backend.backend} backend computes in the scheduler's process"
    if config.backend.num_stage_ranks > 1:
        return f"ranks ({config.backend.rank_option[0]}) execute one step at a time"
    if config.scheduler.uses_speculation:
        return "drafting (spec_method) requires the last token"
    if not config.cache.kv_cache:
        return "without kv_cache each step recomputes the last sampled token"
    if config.scheduler.scheduler_delay_factor:
        return "scheduler_delay_factor requires the result of the last prefill step"
    return ""


def tenant_weights(options: SchedulerOptions) -> dict[str, float]:
    """Parses "NAME=WEIGHT" options into weights by tenant."""
    weights = {}
    for text in options.tenant_weight:
        name, _, weight = text.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = 0.0
        if not name or not 0 < weights[name] < math.inf:
            raise ConfigError(
                f"tenant_weight: got {text!r}, expected NAME=WEIGHT with a number above 0, such"
                " as alice=2"
            )
    return weights
