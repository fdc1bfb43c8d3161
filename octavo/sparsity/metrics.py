"""Sparsity counters and gauges in /metrics."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.config.engine_config import EngineConfig
from octavo.server.state.metric_hooks import MetricHooks, OptionGauge, Series
from octavo.sparsity.options import PrefixWeighingOptions, SparsityOptions

COUNTERS: dict[str, Series] = {
    "prefix_cache_blocks_left_out": (
        "Stored blocks that prompts went without, by prefix_cache_load.",
        lambda stats: stats.left_out_blocks,
    ),
    "neurons_found": (
        "Neurons that were in memory when a step used them, with neuron_cache_bytes.",
        lambda stats: stats.weights.neurons_found,
    ),
    "neurons_read": (
        "Neurons that were read for a step.",
        lambda stats: stats.weights.neurons_read,
    ),
    "neurons_foreseen": (
        "Neurons that were read by a guess, with weights_lookahead.",
        lambda stats: stats.weights.neurons_foreseen,
    ),
    "neurons_foreseen_used": (
        "Neurons that were read by a guess, and that the step then used.",
        lambda stats: stats.weights.neurons_foreseen_used,
    ),
    "kv_spill_found": (
        "Blocks of single layers that were in memory when an attention asked for them, with"
        " kv_spill_dir.",
        lambda stats: stats.counters.get("kv_spill_found", 0),
    ),
    "kv_spill_read": (
        "Blocks of single layers that were read from the file for an attention.",
        lambda stats: stats.counters.get("kv_spill_read", 0),
    ),
    "kv_spill_read_bytes": (
        "Bytes of keys and values read from that file.",
        lambda stats: stats.counters.get("kv_spill_read_bytes", 0),
    ),
    "kv_spill_written_bytes": (
        "Bytes of keys and values written to that file.",
        lambda stats: stats.counters.get("kv_spill_written_bytes", 0),
    ),
    "kv_spill_wait_seconds": (
        "Seconds in which attentions waited for it.",
        lambda stats: stats.counters.get("kv_spill_wait_seconds", 0),
    ),
    "kv_spill_foreseen": (
        "Blocks of single layers that were read by a guess, with kv_spill_ahead.",
        lambda stats: stats.counters.get("kv_spill_foreseen", 0),
    ),
    "kv_spill_foreseen_used": (
        "Blocks of single layers that were read by a guess, and that the layer then asked for.",
        lambda stats: stats.counters.get("kv_spill_foreseen_used", 0),
    ),
}


def _shares(config: EngineConfig) -> Mapping[str, float]:
    """Returns the share that each kind of sparsity omits."""
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
        "Share of generated tokens' inputs, gates and neurons that count as zeros, of the keys that"
        " they do not read, and of the stored keys of a prefix that are not loaded; above 0,"
        " results are approximate.",
        "of",
        _shares,
    )
}


class SparsityMetrics(MetricHooks):
    counters = COUNTERS
    gauges = GAUGES
