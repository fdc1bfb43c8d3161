"""Publishers of KV cache events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.api.errors import ConfigError
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.block_hashes import BlockHashing
from octavo.engine.protocol.kv_events import parse_events_config
from octavo.executor.kv import BLOCK_SIZE

if TYPE_CHECKING:
    from octavo.frontend.kv_event_publisher import KVEventPublisher


def open_publishers(config: EngineConfig) -> list[KVEventPublisher]:
    """Opens a publisher for each engine, before anything is loaded; [] if the options
    disable them.
    """
    events_config = parse_events_config(config.cache.kv_events_config)
    if not events_config.publishes:
        return []
    if not (config.cache.enable_prefix_caching and config.cache.kv_cache):
        raise ConfigError(
            "kv_events_config: requires kv_cache and enable_prefix_caching",
            hint="remove --no-kv-cache and --no-enable-prefix-caching",
        )
    from octavo.frontend.kv_event_publisher import KVEventPublisher

    publishers: list[KVEventPublisher] = []
    try:
        for engine in range(config.fleet.data_parallel_size):
            publishers.append(
                KVEventPublisher(
                    events_config, engine=engine, root=BlockHashing().root(), block_size=BLOCK_SIZE
                )
            )
    except BaseException:
        for publisher in publishers:
            publisher.close()
        raise
    return publishers
