"""Checks the options of KV transfer and the KV pool, and derives other options from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.api.errors import ConfigError
from octavo.config.config_hooks import ConfigHooks
from octavo.config.derive import LOGGED_ONLY
from octavo.config.engine_config import EngineConfig
from octavo.distributed.options import PoolOptions, TransferOptions

SENT_TOKENS = 512
"""Default of long_prefill_token_threshold with role prefill: the blocks of one step are sent while
the next is computed."""
NEEDS_TRANSFER = ("role", "prefill_peer", "kv_transfer_address", "kv_transfer_secret")
NEEDS_POOL = ("kv_pool_lends", "kv_pool_replicas")


class DistributedConfigHooks(ConfigHooks):
    def check(self, config: EngineConfig) -> None:
        pool, transfer = config.of(PoolOptions), config.of(TransferOptions)
        if pool.kv_pool is not None:
            _check_pool(config, pool.kv_pool)
        elif first_given := _first_given(pool, NEEDS_POOL):
            raise ConfigError(
                f"{first_given}: requires kv_pool", hint="set kv_pool to mooncake://HOST:PORT"
            )
        if transfer.kv_transfer is not None:
            _check_transfer(config, transfer, transfer.kv_transfer)
        elif first_given := _first_given(transfer, NEEDS_TRANSFER):
            raise ConfigError(
                f"{first_given}: requires kv_transfer", hint="set kv_transfer, e.g. to zmq"
            )

    def derive(self, config: EngineConfig) -> EngineConfig:
        """Enables block events for an engine with prefill peers, so that its frontend knows the
        cached blocks, and limits the chunk size of an engine that computes prompts for others.
        """
        options = config.of(TransferOptions)
        cache, scheduler = config.cache, config.scheduler
        if options.prefill_peer and cache.kv_events_config is None:
            cache = replace(cache, kv_events_config=LOGGED_ONLY)
        is_prefill = options.kv_transfer is not None and options.role == "prefill"
        if is_prefill and not scheduler.long_prefill_token_threshold:
            scheduler = replace(scheduler, long_prefill_token_threshold=SENT_TOKENS)
        return replace(config, cache=cache, scheduler=scheduler)

    def transfer_option(self, config: EngineConfig) -> str:
        return "" if config.of(TransferOptions).kv_transfer is None else "kv_transfer"

    def store_option(self, config: EngineConfig) -> str:
        return "" if config.of(PoolOptions).kv_pool is None else "kv_pool"


def _first_given(options: Any, names: tuple[str, ...]) -> str:
    """Returns the first of these options that differs from its default; "" if none does."""
    defaults = type(options)()
    return next((name for name in names if getattr(options, name) != getattr(defaults, name)), "")


def _check_pool(config: EngineConfig, url: str) -> None:
    _check_prefix_caching(config, "kv_pool")
    if config.cache.prefix_cache_dir is not None:
        raise ConfigError("kv_pool: not supported with prefix_cache_dir", hint="remove one of them")
    option, num_ranks = config.backend.rank_option
    if num_ranks > 1:
        raise ConfigError(
            f"kv_pool: requires {option} 1, got {num_ranks}",
            hint=f"remove kv_pool, or set {option} to 1",
        )
    _check_stages(config, "kv_pool", url)
    if config.fleet.enable_expert_parallel:
        raise ConfigError(
            f"enable_expert_parallel: not supported with kv_pool {url}",
            hint="remove kv_pool, or set enable_expert_parallel to False",
        )


def _check_transfer(config: EngineConfig, options: TransferOptions, transport: str) -> None:
    _check_prefix_caching(config, "kv_transfer")
    others = {
        "prefix_cache_dir": config.cache.prefix_cache_dir,
        "kv_pool": config.of(PoolOptions).kv_pool,
    }
    for name, given_name in others.items():
        if given_name is not None:
            raise ConfigError(
                f"kv_transfer: not supported with {name}",
                hint="use kv_transfer_size to keep blocks in the memory of the prefill engines",
            )
    _check_processes(config, transport)
    if options.role == "decode" and not options.prefill_peer:
        raise ConfigError(
            "role: got 'decode' without a prefill_peer",
            hint="set it to the kv_transfer_address of each engine with role prefill",
        )
    if options.role == "prefill" and options.prefill_peer:
        raise ConfigError("role: got 'prefill' with a prefill_peer, expected decode or both")


def _check_processes(config: EngineConfig, transport: str) -> None:
    """Raises ConfigError if the engine's processes cannot send blocks."""
    _check_stages(config, "kv_transfer", transport)
    if config.fleet.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size: got {config.fleet.data_parallel_size}, expected 1 with"
            " kv_transfer",
            hint="start one server per engine",
        )
    if config.backend.expert_parallel_size > 1:
        raise ConfigError(
            "kv_transfer: requires expert_parallel_size 1, got"
            f" {config.backend.expert_parallel_size}",
            hint="use tensor_parallel_size instead",
        )
    if config.backend.rank_address is not None:
        raise ConfigError(
            "kv_transfer: requires all ranks on one machine, got a rank_address",
            hint="remove rank_address",
        )


def _check_prefix_caching(config: EngineConfig, name: str) -> None:
    if not (config.cache.enable_prefix_caching and config.cache.kv_cache):
        raise ConfigError(
            f"{name}: requires kv_cache and enable_prefix_caching",
            hint="remove --no-kv-cache and --no-enable-prefix-caching",
        )


def _check_stages(config: EngineConfig, name: str, given_name: str) -> None:
    if config.backend.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size: got {config.backend.pipeline_parallel_size}, not supported"
            f" with {name} {given_name}",
            hint=f"remove {name}, or set pipeline_parallel_size to 1",
        )
