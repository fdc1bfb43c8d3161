"""Prometheus metrics: counters of all engines, and histograms of finished requests, by model.

Each series is exported as `octavo:` and, for existing dashboards, as `vllm:`. Counters are read
from the engines' latest stats; histograms are in `model_metrics.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from octavo.engine.protocol.stats import LATE_COMPILATIONS, STEP_TOKEN_BOUNDS, EngineStats
from octavo.executor.kv import BLOCK_SIZE
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.metric_hooks import Series, metric_hooks
from octavo.server.state.model_metrics import HISTOGRAMS
from octavo.server.state.slot import EngineSlot

PREFIXES = ("octavo:", "vllm:")
LABELS = ("model_name", "engine")
ENGINE = "0"
"""Value of the label `engine` for a single engine, and for series of the model as a whole."""

GAUGES: dict[str, Series] = {
    "num_requests_running": (
        "Number of requests running in the last step.",
        lambda stats: stats.num_running,
    ),
    "num_requests_waiting": (
        "Number of requests waiting in the queue.",
        lambda stats: stats.num_waiting,
    ),
    "num_requests_swapped": (
        "Number of requests swapped to host memory.",
        lambda stats: stats.num_swapped,
    ),
    "num_waiting_tokens": (
        "Number of prompt tokens waiting in the queue.",
        lambda stats: stats.num_waiting_tokens,
    ),
    "kv_cache_usage_perc": (
        "KV cache usage: fraction of KV blocks in use, 0 to 1.",
        lambda stats: stats.kv_usage,
    ),
    "kv_cache_utilisation": (
        "Fraction of the KV bytes allocated to running requests that contain tokens, 0 to 1.",
        lambda stats: stats.kv.utilisation,
    ),
    "kv_blocks_held": (
        "KV blocks allocated to requests, in all cache groups.",
        lambda stats: sum(group.num_held for group in stats.groups),
    ),
    "kv_blocks_shared": (
        "KV blocks shared by more than one request.",
        lambda stats: sum(group.num_shared for group in stats.groups),
    ),
    "kv_block_references": (
        (
            "Sum of the reference counts of KV blocks: the blocks that requests would need without"
            " sharing."
        ),
        lambda stats: sum(group.num_references for group in stats.groups),
    ),
    "kv_blocks_named": (
        "KV blocks on the device that are in the prefix cache, allocated or free.",
        lambda stats: sum(group.num_named for group in stats.groups),
    ),
    "prefix_cache_disk_bytes": (
        "Bytes in prefix_cache_dir, for all models.",
        lambda stats: stats.connector.stored.num_bytes,
    ),
    "prefix_cache_disk_pinned_bytes": (
        "Pinned bytes in prefix_cache_dir.",
        lambda stats: stats.connector.stored.pinned_bytes,
    ),
}
COUNTERS: dict[str, Series] = {
    "prompt_tokens": ("Number of prompt tokens processed.", lambda stats: stats.prompt_tokens),
    "generation_tokens": ("Number of tokens generated.", lambda stats: stats.generation_tokens),
    "prompt_tokens_cached": (
        "Number of prompt tokens served from the prefix cache.",
        lambda stats: stats.prefix_hit_tokens,
    ),
    "prefix_cache_queries": (
        "Prefix cache queries, in tokens.",
        lambda stats: stats.prefix_query_tokens,
    ),
    "prefix_cache_hits": (
        "Prefix cache hits, in tokens.",
        lambda stats: stats.prefix_hit_tokens,
    ),
    "external_prefix_cache_queries": (
        "Prefix cache queries to host memory and disk, in tokens.",
        lambda stats: stats.external_query_tokens,
    ),
    "external_prefix_cache_hits": (
        "Prefix cache hits in host memory and on disk, in tokens.",
        lambda stats: stats.external_hit_tokens,
    ),
    "prefix_cache_damaged_files": (
        "Damaged files removed from prefix_cache_dir.",
        lambda stats: stats.connector.stored.num_damaged,
    ),
    "prefix_cache_write_errors": (
        "Files that could not be written to prefix_cache_dir.",
        lambda stats: stats.connector.stored.num_write_errors,
    ),
    "kv_blocks_fetched": (
        "KV blocks loaded from prefix_cache_dir or from other engines.",
        lambda stats: stats.connector.num_fetched,
    ),
    "kv_fetched_bytes": (
        "Bytes of KV blocks loaded from prefix_cache_dir or from other engines.",
        lambda stats: stats.connector.num_fetched_bytes,
    ),
    "kv_blocks_not_fetched": (
        "KV blocks requested from prefix_cache_dir or other engines but not received.",
        lambda stats: stats.connector.num_not_fetched,
    ),
    "kv_blocks_kept": (
        "KV blocks written to prefix_cache_dir or kept for other engines.",
        lambda stats: stats.connector.num_kept,
    ),
    "kv_transfer_expired_leases": (
        "Leases of KV blocks for other engines that expired before the blocks were fetched.",
        lambda stats: stats.connector.stored.num_expired_leases,
    ),
    "spec_decode_num_drafts": (
        "Number of speculative drafts verified.",
        lambda stats: stats.num_drafts,
    ),
    "spec_decode_num_draft_tokens": (
        "Number of draft tokens verified.",
        lambda stats: stats.num_draft_tokens,
    ),
    "spec_decode_num_accepted_tokens": (
        "Number of accepted draft tokens.",
        lambda stats: stats.num_accepted_tokens,
    ),
    "weights_streamed_bytes": (
        "Bytes of weights streamed from weights_dir during steps.",
        lambda stats: stats.weights.num_bytes,
    ),
    "weights_found": (
        "Streamed weight chunks that were in memory when a matmul needed them.",
        lambda stats: stats.weights.num_found,
    ),
    "weights_waited": (
        "Streamed weight chunks that a matmul had to wait for.",
        lambda stats: stats.weights.num_waited,
    ),
    "weights_wait_seconds": (
        "Seconds that matmuls waited for streamed weights.",
        lambda stats: stats.weights.wait_s,
    ),
    "experts_found": (
        "Experts that were in memory when a router chose them (weights_schedule experts).",
        lambda stats: stats.weights.experts_found,
    ),
    "experts_read": (
        "Experts read from disk when a router chose them.",
        lambda stats: stats.weights.experts_read,
    ),
    "experts_prefetched": (
        "Experts prefetched by those of the layer before.",
        lambda stats: stats.weights.experts_prefetched,
    ),
    "experts_prefetched_used": (
        "Prefetched experts that the router then chose.",
        lambda stats: stats.weights.experts_prefetched_used,
    ),
    "num_preemptions": (
        "Number of preemptions.",
        lambda stats: stats.num_preemptions,
    ),
    "num_swaps": (
        "Number of preemptions by swapping to host memory.",
        lambda stats: stats.num_swaps,
    ),
    "kernel_compilations": (
        "GPU kernels compiled during steps, after the warm-up; each delays a step.",
        lambda stats: stats.counters.get(LATE_COMPILATIONS, 0),
    ),
    "num_engine_restarts": (
        "Number of engine restarts after a hang or crash.",
        lambda stats: stats.num_restarts,
    ),
}
COUNTERS |= {name: series for hooks in metric_hooks() for name, series in hooks.counters.items()}
OPTION_GAUGES = {name: gauge for hooks in metric_hooks() for name, gauge in hooks.gauges.items()}
"""Gauges of extensions that depend only on a model's options."""
READINESS = ("model_ready", "1 if the model's engine accepts requests, else 0.")
CACHE = (
    "cache_config_info",
    "Always 1; the labels are the KV cache options. num_gpu_blocks is the number of KV blocks on"
    " any device.",
)
CACHE_LABELS = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
REJECTIONS = (
    "admission_rejections",
    "Number of requests rejected with 429: full queue or high predicted latency.",
)
STEP_TOKENS = ("iteration_tokens_total", "Number of tokens computed per step.")
ENDINGS = ("request_success", "Number of finished requests by finish reason.")


class ServerMetrics:
    """All series of the models in a directory."""

    def __init__(self, models: ModelDirectory) -> None:
        self._models = models
        self._registry = CollectorRegistry()
        self._registry.register(_Aliased(self._families))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _families(self) -> Iterator[Metric]:
        yield self._readiness()
        loaded = [(slot, slot.loaded.stats()) for slot in self._models if slot.loaded is not None]
        if not loaded:
            return
        engines = [
            (slot, str(index), one)
            for slot, stats in loaded
            for index, one in enumerate(stats.engines or [stats])
        ]
        yield from self._option_gauges()
        yield _cache_info(engines)
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for slot, index, stats in engines:
                gauge.add_metric((slot.name, index), read(stats))
            yield gauge
        for name, (text, read) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for slot, index, stats in engines:
                counter.add_metric((slot.name, index), read(stats))
            yield counter
        endings = CounterMetricFamily(*ENDINGS, labels=(*LABELS, "finished_reason"))
        for slot, _ in loaded:
            for reason, count in slot.metrics.endings.items():
                endings.add_metric((slot.name, ENGINE, reason), count)
        yield endings
        rejections = CounterMetricFamily(*REJECTIONS, labels=(*LABELS, "reason"))
        for slot, _ in loaded:
            if slot.loaded is not None:
                for reason, count in slot.loaded.limits.rejections.items():
                    rejections.add_metric((slot.name, ENGINE, reason), count)
        yield rejections
        yield _step_tokens(engines)
        for name, (text, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=LABELS)
            for slot, _ in loaded:
                buckets = slot.metrics.tallies[name].buckets()
                histogram.add_metric((slot.name, ENGINE), *buckets)
            yield histogram

    def _option_gauges(self) -> Iterator[Metric]:
        for name, (text, label, read) in OPTION_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=(*LABELS, label))
            for slot in self._models:
                if slot.loaded is not None:
                    for value, number in read(slot.loaded.config).items():
                        family.add_metric((slot.name, ENGINE, value), number)
            yield family

    def _readiness(self) -> Metric:
        family = GaugeMetricFamily(*READINESS, labels=LABELS)
        for slot in self._models:
            family.add_metric((slot.name, ENGINE), slot.loaded is not None and not slot.trouble)
        return family


def _step_tokens(engines: Iterable[tuple[EngineSlot, str, EngineStats]]) -> Metric:
    family = HistogramMetricFamily(*STEP_TOKENS, labels=LABELS)
    names = [*map(floatToGoString, STEP_TOKEN_BOUNDS), "+Inf"]
    for slot, index, stats in engines:
        counts = itertools.accumulate(stats.step_tokens.counts)
        buckets = list(zip(names, counts, strict=True))
        family.add_metric((slot.name, index), buckets, stats.step_tokens.total)
    return family


def _cache_info(engines: Iterable[tuple[EngineSlot, str, EngineStats]]) -> Metric:
    """Returns the KV cache options of each engine, for routers."""
    family = GaugeMetricFamily(*CACHE, labels=(*LABELS, *CACHE_LABELS))
    for slot, index, stats in engines:
        if slot.loaded is not None:
            cache = slot.loaded.config.cache
            options = (BLOCK_SIZE, stats.num_blocks, cache.kv_cache_dtype)
            caches = cache.enable_prefix_caching
            family.add_metric((slot.name, index, *map(str, options), str(caches)), 1)
    return family


class _Aliased(Collector):
    """Yields each metric under every prefix."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family, prefix in itertools.product(list(self._families()), PREFIXES):
            named = Metric(prefix + family.name, family.documentation, family.type)
            named.samples = [
                Sample(prefix + sample.name, *sample[1:])
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield named
