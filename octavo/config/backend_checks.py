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
from octavo.config.rank_address import check_rank_secret, parse_rank_address

MAX_ENGINES = 64
"""Maximum of data_parallel_size."""

TORCH_ONLY = ("device", "attention_backend", "torch_kernels", "enforce_eager")
NATIVE_ONLY = ("cpu_level",)
"""Options without effect on other backends, which are always batch-invariant."""


def check_backend(config: EngineConfig) -> None:
    """Raises ConfigError if backend or parallelism options conflict with others."""
    _check_choice(config.backend)
    _check_offload(config)
    if config.model.quantization == "fp8" and config.backend.backend == "native":
        hint = "use int8, which is the more exact, or set backend to torch"
        raise ConfigError(
            "quantization: fp8 is for the torch and reference backends, got 'native'", hint=hint
        )
    _check_ranks(config)
    _check_fleet(config)


def _check_choice(options: BackendChoice) -> None:
    usual = BackendChoice()
    given = [name for name in TORCH_ONLY if getattr(options, name) != getattr(usual, name)]
    if given and options.backend != "torch":
        raise ConfigError(
            f"{given[0]}: allowed only with the torch backend, got {options.backend!r}",
            hint="set backend to torch",
        )
    native_only = [name for name in NATIVE_ONLY if getattr(options, name) != getattr(usual, name)]
    if native_only and options.backend != "native":
        raise ConfigError(
            f"{native_only[0]}: allowed only with the native backend, got {options.backend!r}",
            hint="set backend to native",
        )


def _check_offload(config: EngineConfig) -> None:
    options, usual = config.offload, OffloadOptions()
    if options.weights_memory_bytes is None:
        for name in ("weights_dir", "weights_schedule"):
            if getattr(options, name) != getattr(usual, name):
                raise ConfigError(
                    f"{name}: allowed only with weights_memory_bytes",
                    hint="set weights_memory_bytes to the memory that weights may take",
                )
        return
    if config.backend.backend != "native":
        raise ConfigError(
            "weights_memory_bytes: allowed only with the native backend, got"
            f" {config.backend.backend!r}",
            hint="set backend to native, or leave weights_memory_bytes out",
        )
    if not options.weights_dir:
        raise ConfigError(
            "weights_memory_bytes: allowed only with weights_dir",
            hint="name a directory on a disk with room for the model's weights",
        )


def _check_rank_address(config: EngineConfig) -> None:
    """Checks the address and the secret for ranks on other machines."""
    options = config.backend
    if options.rank_address is None:
        if options.rank_secret is not None:
            raise ConfigError(
                "rank_secret: allowed only with rank_address", hint="leave it out, or set both"
            )
        return
    if options.backend != "torch":
        raise ConfigError(
            f"rank_address: allowed only with the backend torch, got {options.backend!r}",
            hint="native ranks share the memory of one machine; leave rank_address out",
        )
    if options.num_ranks == 1 or config.fleet.data_parallel_size > 1:
        raise ConfigError(
            f"rank_address: allowed only where one engine has several ranks, got"
            f" {options.num_ranks} of each of {config.fleet.data_parallel_size}",
            hint="set tensor_parallel_size, or leave rank_address out",
        )
    check_rank_secret(parse_rank_address(options.rank_address)[0], options.rank_secret)


def _check_ranks(config: EngineConfig) -> None:
    option, num_ranks = config.backend.rank_option
    _check_rank_address(config)
    if config.backend.pipeline_parallel_size > 1:
        _check_stages(config)
    if num_ranks == 1:
        return
    if config.backend.backend == "reference":
        what = (
            f"{option}: got {num_ranks}, allowed only with the backends native and"
            " torch, got 'reference'"
        )
        raise ConfigError(what, hint=f"set backend to native, or leave {option} at 1")
    if config.offload.weights_memory_bytes is not None:
        what = f"weights_memory_bytes: allowed only where {option} is 1, got {num_ranks}"
        raise ConfigError(what, hint="more ranks hold more weights in memory")
    # Blocks that go to other engines pass through slots that each rank has.
    sized = () if transfer_option(config) else ("kv_offloading_size",)
    for name in ("prefix_cache_dir", *sized):
        if getattr(config.cache, name) is not None:
            what = f"{name}: allowed only where {option} is 1, got {num_ranks}"
            raise ConfigError(what, hint=f"leave out {name}, or leave {option} at 1")


def _check_stages(config: EngineConfig) -> None:
    """Raises ConfigError for options that pipeline parallelism does not support."""
    got = f"pipeline_parallel_size: got {config.backend.pipeline_parallel_size}"
    if config.backend.backend == "torch":
        raise ConfigError(
            f"{got}, allowed only with the backends native and reference, got 'torch'",
            hint="set backend to native, or share out the heads: tensor_parallel_size",
        )
    usual = EngineConfig()
    for part, name in (
        ("scheduler", "spec_method"),
        ("offload", "weights_memory_bytes"),
        ("cache", "prefix_cache_dir"),
        ("cache", "kv_offloading_size"),
        ("cache", "kv_cache"),
    ):
        given = getattr(getattr(config, part), name)
        if given not in (getattr(getattr(usual, part), name), "none"):
            raise ConfigError(
                f"{got}, which is not allowed beside {name} {given}",
                hint=f"leave {name} out, or leave pipeline_parallel_size at 1",
            )


def _check_fleet(config: EngineConfig) -> None:
    num_engines, usual = config.fleet.data_parallel_size, FleetOptions()
    if num_engines == 1:
        if config.fleet.routing_policy != usual.routing_policy:
            raise ConfigError(
                f"routing_policy: got {config.fleet.routing_policy!r}, allowed only with several"
                " engines",
                hint="set data_parallel_size above 1, or leave routing_policy out",
            )
        if config.fleet.enable_expert_parallel:
            raise ConfigError(
                "enable_expert_parallel: allowed only with several engines",
                hint="set data_parallel_size above 1; expert_parallel_size shares out one engine's",
            )
        return
    if config.fleet.enable_expert_parallel:
        _check_shared_experts(config)
    got = f"data_parallel_size: got {num_engines}"
    if num_engines > MAX_ENGINES:
        raise ConfigError(f"{got}, allowed is at most {MAX_ENGINES}")
    if config.backend.num_stage_ranks > 1 and config.backend.backend == "torch":
        option, size = config.backend.rank_option
        raise ConfigError(
            f"{got}, allowed is 1 with {option} {size} on the torch backend",
            hint="start a server for each group of ranks",
        )
    if config.backend.backend == "torch" and config.cache.kv_cache_memory_bytes is None:
        raise ConfigError(
            f"{got} on the torch backend without kv_cache_memory_bytes",
            hint="say how much memory each engine's KV cache takes",
        )


def _check_shared_experts(config: EngineConfig) -> None:
    """Raises ConfigError for options that engines with shared experts do not support."""
    if config.backend.backend != "native":
        raise ConfigError(
            "enable_expert_parallel: allowed only with the native backend, got"
            f" {config.backend.backend!r}",
            hint="set backend to native, or leave enable_expert_parallel out",
        )
    usual = EngineConfig()
    for part, name in (
        ("scheduler", "spec_model"),
        ("lora", "enable_lora"),
        ("offload", "weights_memory_bytes"),
        ("cache", "prefix_cache_dir"),
        ("cache", "kv_offloading_size"),
    ):
        given = getattr(getattr(config, part), name)
        if given != getattr(getattr(usual, part), name):
            raise ConfigError(
                f"enable_expert_parallel: not allowed beside {name} {given}",
                hint=f"leave {name} out, or give each engine all experts",
            )
