"""Checks of the backend and parallelism options."""

from __future__ import annotations

from octavo.api.errors import ConfigError
from octavo.config.backend_options import (
    BackendChoice,
    FleetOptions,
    OffloadOptions,
)
from octavo.config.config_hooks import transfer_option
from octavo.config.engine_config import EngineConfig
from octavo.config.numa_nodes import parse_numa_nodes
from octavo.config.rank_address import check_rank_secret, parse_rank_address

MAX_ENGINES = 64
"""Maximum of data_parallel_size."""

TORCH_ONLY = ("device", "attention_backend", "torch_kernels", "enforce_eager")
NATIVE_ONLY = ("cpu_level",)
"""Options that only apply to the torch backend; the other backends are always batch-invariant."""


def check_backend(config: EngineConfig) -> None:
    """Raises ConfigError if backend or parallelism options conflict with others."""
    _check_choice(config.backend)
    _check_offload(config)
    if config.model.quantization == "fp8" and config.backend.backend == "native":
        hint = "use int8, which is more accurate, or set backend to torch"
        raise ConfigError(
            "quantization: fp8 requires the torch or reference backend, got 'native'", hint=hint
        )
    _check_ranks(config)
    _check_fleet(config)


def _check_choice(options: BackendChoice) -> None:
    defaults = BackendChoice()
    set_options = [name for name in TORCH_ONLY if getattr(options, name) != getattr(defaults, name)]
    if set_options and options.backend != "torch":
        raise ConfigError(
            f"{set_options[0]}: requires the torch backend, got {options.backend!r}",
            hint="set backend to torch",
        )
    native_only = [
        name for name in NATIVE_ONLY if getattr(options, name) != getattr(defaults, name)
    ]
    if native_only and options.backend != "native":
        raise ConfigError(
            f"{native_only[0]}: requires the native backend, got {options.backend!r}",
            hint="set backend to native",
        )


def _check_offload(config: EngineConfig) -> None:
    options, defaults = config.offload, OffloadOptions()
    if options.weights_memory_bytes is None:
        for name in ("weights_dir", "weights_schedule"):
            if getattr(options, name) != getattr(defaults, name):
                raise ConfigError(
                    f"{name}: requires weights_memory_bytes",
                    hint="set weights_memory_bytes to the memory available for weights",
                )
        return
    if config.backend.backend != "native":
        raise ConfigError(
            f"weights_memory_bytes: requires the native backend, got {config.backend.backend!r}",
            hint="set backend to native, or remove weights_memory_bytes",
        )
    if not options.weights_dir:
        raise ConfigError(
            "weights_memory_bytes: requires weights_dir",
            hint="use a directory on a disk with enough space for the model's weights",
        )


def _check_rank_address(config: EngineConfig) -> None:
    """Checks the address and the secret for ranks on other machines."""
    options = config.backend
    if options.rank_address is None:
        if options.rank_secret is not None:
            raise ConfigError("rank_secret: requires rank_address", hint="remove it, or set both")
        return
    if options.backend != "torch":
        raise ConfigError(
            f"rank_address: requires the torch backend, got {options.backend!r}",
            hint="native ranks run on one machine; remove rank_address",
        )
    if options.num_ranks == 1 or config.fleet.data_parallel_size > 1:
        raise ConfigError(
            f"rank_address: requires one engine with several ranks, got"
            f" data_parallel_size {config.fleet.data_parallel_size} and {options.num_ranks} ranks",
            hint="set tensor_parallel_size, or remove rank_address",
        )
    check_rank_secret(parse_rank_address(options.rank_address)[0], options.rank_secret)


def _check_ranks(config: EngineConfig) -> None:
    option, num_ranks = config.backend.rank_option
    _check_rank_address(config)
    parse_numa_nodes(config.backend.numa_bind_nodes)
    if config.backend.numa_bind_nodes and config.backend.backend == "torch":
        raise ConfigError(
            "numa_bind_nodes: requires the native backend, got 'torch'",
            hint="set backend to native, or start the server with numactl",
        )
    if config.model.enable_prompt_embeds and config.backend.num_ranks > 1:
        raise ConfigError(
            f"enable_prompt_embeds: requires one rank, got {config.backend.num_ranks}",
            hint=f"remove enable_prompt_embeds, or set {option} to 1",
        )
    if config.backend.pipeline_parallel_size > 1:
        _check_stages(config)
    if num_ranks == 1:
        return
    if config.backend.backend == "reference":
        what = f"{option}: got {num_ranks}, requires the native or torch backend, got 'reference'"
        raise ConfigError(what, hint=f"set backend to native, or set {option} to 1")
    if config.offload.weights_memory_bytes is not None:
        what = f"weights_memory_bytes: requires {option} 1, got {num_ranks}"
        raise ConfigError(
            what, hint="remove weights_memory_bytes: with more ranks, more weights fit in memory"
        )
    # Blocks for other engines pass through slots that every rank has.
    sized = () if transfer_option(config) else ("kv_offloading_size",)
    for name in ("prefix_cache_dir", *sized):
        if getattr(config.cache, name) is not None:
            what = f"{name}: requires {option} 1, got {num_ranks}"
            raise ConfigError(what, hint=f"remove {name}, or set {option} to 1")


def _check_stages(config: EngineConfig) -> None:
    """Raises ConfigError for options that pipeline parallelism does not support."""
    got = f"pipeline_parallel_size: got {config.backend.pipeline_parallel_size}"
    if config.backend.backend == "torch":
        raise ConfigError(
            f"{got}, requires the native or reference backend, got 'torch'",
            hint="set backend to native, or use tensor_parallel_size instead",
        )
    defaults = EngineConfig()
    for part, name in (
        ("scheduler", "spec_method"),
        ("offload", "weights_memory_bytes"),
        ("cache", "prefix_cache_dir"),
        ("cache", "kv_offloading_size"),
        ("cache", "kv_cache"),
    ):
        value = getattr(getattr(config, part), name)
        if value not in (getattr(getattr(defaults, part), name), "none"):
            raise ConfigError(
                f"{got}, not supported with {name} {value}",
                hint=f"remove {name}, or set pipeline_parallel_size to 1",
            )


def _check_fleet(config: EngineConfig) -> None:
    num_engines, defaults = config.fleet.data_parallel_size, FleetOptions()
    if num_engines == 1:
        if config.fleet.routing_policy != defaults.routing_policy:
            raise ConfigError(
                f"routing_policy: got {config.fleet.routing_policy!r}, requires several engines",
                hint="set data_parallel_size above 1, or remove routing_policy",
            )
        if config.fleet.enable_expert_parallel:
            raise ConfigError(
                "enable_expert_parallel: requires several engines",
                hint="set data_parallel_size above 1, or use expert_parallel_size to split the"
                " experts of one engine",
            )
        return
    if config.fleet.enable_expert_parallel:
        _check_shared_experts(config)
    got = f"data_parallel_size: got {num_engines}"
    if num_engines > MAX_ENGINES:
        raise ConfigError(f"{got}, expected at most {MAX_ENGINES}")
    if config.backend.num_stage_ranks > 1 and config.backend.backend == "torch":
        option, size = config.backend.rank_option
        raise ConfigError(
            f"{got}, expected 1 with {option} {size} on the torch backend",
            hint="start one server per group of ranks",
        )
    if config.backend.backend == "torch" and config.cache.kv_cache_memory_bytes is None:
        raise ConfigError(
            f"{got} on the torch backend without kv_cache_memory_bytes",
            hint="set kv_cache_memory_bytes for each engine",
        )


def _check_shared_experts(config: EngineConfig) -> None:
    """Raises ConfigError for options that engines with shared experts do not support."""
    if config.backend.backend != "native":
        raise ConfigError(
            f"enable_expert_parallel: requires the native backend, got {config.backend.backend!r}",
            hint="set backend to native, or remove enable_expert_parallel",
        )
    defaults = EngineConfig()
    for part, name in (
        ("scheduler", "spec_model"),
        ("lora", "enable_lora"),
        ("offload", "weights_memory_bytes"),
        ("cache", "prefix_cache_dir"),
        ("cache", "kv_offloading_size"),
    ):
        value = getattr(getattr(config, part), name)
        if value != getattr(getattr(defaults, part), name):
            raise ConfigError(
                f"enable_expert_parallel: not supported with {name} {value}",
                hint=f"remove {name}, or set enable_expert_parallel to False",
            )
