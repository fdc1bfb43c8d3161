"""The gauges of an engine's statistics: what its queues and its KV blocks hold now."""

from __future__ import annotations

from octavo.engine.kv.block_manager import BlockManager
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.scheduler.request_queues import RequestQueues


def set_gauges(stats: EngineStats, queues: RequestQueues, blocks: BlockManager) -> None:
    """Sets the gauges to this moment, and the counts that others keep."""
    stats.num_running = queues.num_running_seqs
    stats.num_swapped = len(queues.swapped)
    stats.num_waiting = len(queues.waiting)
    stats.num_waiting_tokens = queues.num_waiting_tokens
    stats.num_blocks = blocks.num_blocks
    stats.num_used_blocks = blocks.num_blocks - blocks.num_free_blocks
    stats.num_host_blocks = blocks.host.num_used_blocks
    stats.groups = [pool.counts() for pool in blocks.pools]
    found = blocks.prefix_counts
    stats.prefix_query_tokens = found.num_queried
    stats.prefix_hit_tokens = found.num_hits
    stats.external_query_tokens = found.num_external_queried
    stats.external_hit_tokens = found.num_external_hits
    stats.left_out_blocks = found.num_left_out
    stats.connector = blocks.connector.snapshot()
