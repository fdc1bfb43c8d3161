"""The server's metrics: the engine's counters, and histograms over finished requests.

Every series has an `octavo:` name and, as an alias for dashboards that exist, the `vllm:` name.
Counters come from the engine's last snapshot; histograms are filled when a request ends.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from octavo.engine.stats import EngineStats
from octavo.outputs import RequestMetrics, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.state.slot import EngineSlot, served_name

PREFIXES = ("octavo:", "vllm:")
LABELS = ("model_name", "engine")

REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
"""Upper bounds of the latency buckets, in seconds; vLLM's."""

TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1, 2.5, 5, 10, 40, 160),
)
"""Upper bounds of the buckets of times between tokens, in seconds."""

TOKEN_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
SAMPLE_COUNTS = (1, 2, 5, 10, 20)

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
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", TOKEN_SECONDS),
    "inter_token_latency_seconds": ("From one token to the next.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": (
        "Mean of a request's time from one token to the next.",
        TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUEST_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step.", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token.", REQUEST_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", REQUEST_SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token.", REQUEST_SECONDS),
    "request_prompt_tokens": ("Tokens of the prompt.", TOKEN_COUNTS),
    "request_generation_tokens": ("Tokens generated.", TOKEN_COUNTS),
    "request_params_n": ("Samples asked for.", SAMPLE_COUNTS),
    "request_params_max_tokens": ("Most tokens asked for.", TOKEN_COUNTS),
    "request_num_preemptions": ("Preemptions of a request.", SAMPLE_COUNTS),
}


class Tally:
    """A histogram's counts.

    prometheus_client's own takes ten times as long for a value, and at a stream's end all other
    streams wait for it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        """Takes the buckets' inclusive upper bounds, ascending; a last bucket has none."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Returns (bound, number of values up to it) by bucket, and the sum of all values."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self._counts), strict=True)), self._sum


class ServerMetrics:
    """Histograms and counts of the server's requests, and a view of the engine's counters."""

    def __init__(self, slot: EngineSlot) -> None:
        self._slot = slot
        self._tallies = {name: Tally(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._endings = Counter(
            "request_success",
            "Requests by how they ended.",
            (*LABELS, "finished_reason"),
            registry=None,
        )
        self._registry = CollectorRegistry()
        self._registry.register(_Aliased(self._families))

    def observe(self, output: RequestOutput, params: SamplingParams) -> None:
        """Takes in a request that has ended."""
        for sample in output.outputs:
            self._end(sample.finish_reason or "error")
        if output.metrics is not None and output.error is None:
            for name, values in _measures(output, output.metrics, params, time.monotonic()):
                self._tallies[name].add(values)

    def count_abort(self) -> None:
        """Counts a request that was aborted before its end."""
        self._end("abort")

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _end(self, reason: str) -> None:
        self._endings.labels(*self._labels(), reason).inc()

    def _labels(self) -> tuple[str, str]:
        """Returns the values of the labels model_name and engine."""
        llm = self._slot.loaded
        return "" if llm is None else served_name(llm), "0"

    def _families(self) -> Iterator[Metric]:
        llm = self._slot.loaded
        if llm is None:
            return
        stats = llm.stats()
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels(), read(stats))
            yield gauge
        for name, (text, read) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels(), read(stats))
            yield counter
        yield from self._endings.collect()
        for name, tally in self._tallies.items():
            histogram = HistogramMetricFamily(name, HISTOGRAMS[name][0], labels=LABELS)
            histogram.add_metric(self._labels(), *tally.buckets())
            yield histogram


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


def _measures(
    output: RequestOutput, metrics: RequestMetrics, params: SamplingParams, now: float
) -> Iterator[tuple[str, Iterable[float]]]:
    yield "e2e_request_latency_seconds", [now - metrics.arrival_time]
    yield "request_prompt_tokens", [len(output.prompt_token_ids)]
    yield "request_generation_tokens", [metrics.num_generation_tokens]
    yield "request_params_n", [params.n]
    yield "request_num_preemptions", [metrics.num_preemptions]
    if params.max_tokens is not None:
        yield "request_params_max_tokens", [params.max_tokens]
    times = metrics.token_times
    if times:
        yield "time_to_first_token_seconds", [times[0] - metrics.arrival_time]
        yield "request_decode_time_seconds", [times[-1] - times[0]]
        yield (
            "inter_token_latency_seconds",
            (later - earlier for earlier, later in itertools.pairwise(times)),
        )
        if len(times) > 1:
            yield (
                "request_time_per_output_token_seconds",
                [(times[-1] - times[0]) / (len(times) - 1)],
            )
    if times and metrics.scheduled_ts is not None:
        yield "request_queue_time_seconds", [metrics.scheduled_ts - metrics.arrival_time]
        yield "request_prefill_time_seconds", [times[0] - metrics.scheduled_ts]
        yield "request_inference_time_seconds", [times[-1] - metrics.scheduled_ts]
