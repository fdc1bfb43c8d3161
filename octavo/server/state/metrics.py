"""The server's metrics: every engine's counters, and histograms over finished requests, by model.

Every series has an `octavo:` name and, as an alias for dashboards that exist, the `vllm:` name.
Counters come from each engine's last snapshot; histograms are those of `model_metrics.py`.
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

from octavo.engine.stats import EngineStats
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.model_metrics import HISTOGRAMS

PREFIXES = ("octavo:", "vllm:")
LABELS = ("model_name", "engine")
ENGINE = "0"
"""Value of the label `engine`: each model has one."""

GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": (
        "Requests of which the last step computed tokens.",
        lambda stats: stats.num_running,
    ),
    "num_requests_waiting": ("Requests in the queue.", lambda stats: stats.num_waiting),
    "num_requests_swapped": (
        "Requests whose KV blocks are in host memory.",
        lambda stats: stats.num_swapped,
    ),
    "num_waiting_tokens": (
        "Tokens of the requests in the queue.",
        lambda stats: stats.num_waiting_tokens,
    ),
    "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", lambda stats: stats.kv_usage),
    "kv_cache_utilisation": (
        "Share of the bytes reserved for running requests' KV that hold any, 0 to 1.",
        lambda stats: stats.kv.utilisation,
    ),
    "kv_blocks_held": (
        "KV blocks that requests hold, of all cache groups.",
        lambda stats: sum(group.num_held for group in stats.groups),
    ),
    "kv_blocks_shared": (
        "Of these, held by more than one request.",
        lambda stats: sum(group.num_shared for group in stats.groups),
    ),
    "kv_block_references": (
        (
            "Reference counts of the KV blocks, summed: what requests would hold if they shared"
            " nothing."
        ),
        lambda stats: sum(group.num_references for group in stats.groups),
    ),
    "kv_blocks_named": (
        "KV blocks on the device in which the prefix cache finds something, held or not.",
        lambda stats: sum(group.num_named for group in stats.groups),
    ),
    "prefix_cache_disk_bytes": (
        "Bytes in prefix_cache_dir, of all models.",
        lambda stats: stats.connector.stored.num_bytes,
    ),
    "prefix_cache_disk_pinned_bytes": (
        "Of these, pinned.",
        lambda stats: stats.connector.stored.pinned_bytes,
    ),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prompt_tokens": ("Prompt tokens processed.", lambda stats: stats.prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda stats: stats.generation_tokens),
    "prompt_tokens_cached": (
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.prefix_hit_tokens,
    ),
    "prefix_cache_queries": (
        "Tokens looked up in the prefix cache.",
        lambda stats: stats.prefix_query_tokens,
    ),
    "prefix_cache_hits": (
        "Tokens found in the prefix cache.",
        lambda stats: stats.prefix_hit_tokens,
    ),
    "external_prefix_cache_queries": (
        "Tokens looked up in host memory and on disk.",
        lambda stats: stats.external_query_tokens,
    ),
    "external_prefix_cache_hits": (
        "Tokens found in host memory and on disk.",
        lambda stats: stats.external_hit_tokens,
    ),
    "prefix_cache_damaged_files": (
        "Damaged files met in prefix_cache_dir, and removed.",
        lambda stats: stats.connector.stored.num_damaged,
    ),
    "prefix_cache_write_errors": (
        "Files that could not be written there.",
        lambda stats: stats.connector.stored.num_write_errors,
    ),
    "num_preemptions": (
        "Requests that had to give up their KV blocks.",
        lambda stats: stats.num_preemptions,
    ),
    "num_swaps": ("Preemptions to host memory.", lambda stats: stats.num_swaps),
    "num_engine_restarts": (
        "Engines replaced because they hung or died.",
        lambda stats: stats.num_restarts,
    ),
}
READINESS = ("model_ready", "Whether the model's engine takes requests: 1, or 0.")
ENDINGS = ("request_success", "Requests by how they ended.")


class ServerMetrics:
    """All series of the models in a directory, as they are when they are read."""

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
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for slot, stats in loaded:
                gauge.add_metric((slot.name, ENGINE), read(stats))
            yield gauge
        for name, (text, read) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for slot, stats in loaded:
                counter.add_metric((slot.name, ENGINE), read(stats))
            yield counter
        endings = CounterMetricFamily(*ENDINGS, labels=(*LABELS, "finished_reason"))
        for slot, _ in loaded:
            for reason, count in slot.metrics.endings.items():
                endings.add_metric((slot.name, ENGINE, reason), count)
        yield endings
        for name, (text, _) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, text, labels=LABELS)
            for slot, _ in loaded:
                buckets = slot.metrics.tallies[name].buckets()
                histogram.add_metric((slot.name, ENGINE), *buckets)
            yield histogram

    def _readiness(self) -> Metric:
        family = GaugeMetricFamily(*READINESS, labels=LABELS)
        for slot in self._models:
            family.add_metric((slot.name, ENGINE), not slot.trouble)
        return family


class _Aliased(Collector):
    """A collector that yields each family once under every prefix."""

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
