"""Sparsity counters and gauges in /metrics."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.config.engine_config import EngineConfig
from octavo.server.state.metric_hooks import MetricHooks, OptionGauge, Series
from octavo.sparsity.options import PrefixWeighingOptions, SparsityOptions

COUNTERS: dict[str, Series] = {
    "prefix_cache_blocks_left_out": (
        "Stored blocks that prompts did not load because of prefix_cache_load.",
        lambda stats: stats.left_out_blocks,
    ),
    "neurons_found": (
        "Neurons found in memory by a step (neuron_cache_bytes).",
        lambda stats: stats.weights.neurons_found,
    ),
    "neurons_read": (
        "Neurons read from disk for a step.",
        lambda stats: stats.weights.neurons_read,
    ),
    "neurons_foreseen": (
        "Neurons prefetched (weights_lookahead).",
        lambda stats: stats.weights.neurons_foreseen,
    ),
    "neurons_foreseen_used": (
        "Prefetched neurons that the step used.",
        lambda stats: stats.weights.neurons_foreseen_used,
    ),
    "kv_spill_found": (
        "Per-layer KV blocks found in memory by attention (kv_spill_dir).",
        lambda stats: stats.counters.get("kv_spill_found", 0),
    ),
    "kv_spill_read": (
        "Per-layer KV blocks read from the file for attention.",
        lambda stats: stats.counters.get("kv_spill_read", 0),
    ),
    "kv_spill_read_bytes": (
        "Bytes of K and V read from the file in kv_spill_dir.",
        lambda stats: stats.counters.get("kv_spill_read_bytes", 0),
    ),
    "kv_spill_written_bytes": (
        "Bytes of K and V written to the file in kv_spill_dir.",
        lambda stats: stats.counters.get("kv_spill_written_bytes", 0),
    ),
    "kv_spill_wait_seconds": (
        "Seconds that attention waited for the file in kv_spill_dir.",
        lambda stats: stats.counters.get("kv_spill_wait_seconds", 0),
    ),
    "kv_spill_foreseen": (
        "Per-layer KV blocks prefetched (kv_spill_ahead).",
        lambda stats: stats.counters.get("kv_spill_foreseen", 0),
    ),
    "kv_spill_foreseen_used": (
        "Prefetched per-layer KV blocks that attention used.",
        lambda stats: stats.counters.get("kv_spill_foreseen_used", 0),
    ),
}


def _shares(config: EngineConfig) -> Mapping[str, float]:
    """Returns the fraction of work that each kind of sparsity omits."""
    options, weighing = config.of(SparsityOptions), config.of(PrefixWeighingOptions)
    return {
        "inputs": options.activation_sparsity,
        "gates": options.gate_sparsity,
        "neurons": options.neuron_sparsity,
        "keys": options.key_sparsity,
        "stored keys": weighing.prefix_sparsity,
    }


GAUGES = {
    "sparsity": OptionGauge(
        "Fraction of inputs, gates and neurons treated as zero, of keys not read and of stored"
        " prefix blocks not loaded; above 0, results are approximate.",
        "of",
        _shares,
    )
}


class SparsityMetrics(MetricHooks):
    counters = COUNTERS
    gauges = GAUGES
