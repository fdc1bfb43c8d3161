"""The router's metrics: forwarded requests, retries, and the accuracy of its cache predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.distributed.router.members import Member, Members

PREFIX = "octavo:router_"
GAUGES: dict[str, tuple[str, Callable[[Member], float]]] = {
    "server_up": ("1 if the server receives requests, else 0.", lambda one: one.is_well),
    "running": ("Number of requests running on the server.", lambda one: one.num_running),
    "queued_tokens": (
        "Uncached prompt tokens of requests without a first token.",
        lambda one: one.target.queued_tokens,
    ),
    "known_blocks": (
        "KV blocks that the server is known or expected to have cached.",
        lambda one: len(one.target.cached),
    ),
    "prefill_rate": (
        "Measured prefill rate in uncached prompt tokens per second; 0 until measured.",
        lambda one: one.target.rate or 0.0,
    ),
}
COUNTERS = {
    "requests": "Number of requests forwarded, by server and status.",
    "retries": "Number of requests retried on another server before the first byte, by server and"
    " reason.",
    "broken_answers": "Number of responses that broke off after the first byte, by server.",
    "refusals": "Number of requests that the router rejected, by status.",
    "prompt_tokens": "Number of prompt tokens of routed requests, as counted by the router.",
    "predicted_cached_tokens": "Prompt tokens expected to be cached on the chosen server.",
    "found_cached_tokens": "Cached prompt tokens reported by the servers.",
}
"""Series and their help texts; each name ends in `_total`."""
LABELS = {
    "requests": ("server", "status"),
    "retries": ("server", "reason"),
    "broken_answers": ("server",),
    "refusals": ("status",),
}


@dataclass(slots=True)
class RouterCounts:
    """Event counters of a router."""

    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """Counts, by series and label values."""

    def add(self, series: str, *labels: str, by: int = 1) -> None:
        """Adds to a series of `COUNTERS`."""
        self.counts[(series, *labels)] += by


class RouterMetrics(Collector):
    """Collector of all series of a router."""

    def __init__(self, members: Members, counts: RouterCounts) -> None:
        self._members = members
        self._counts = counts
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("server",))
            for index, member in enumerate(self._members):
                gauge.add_metric((str(index),), read(member))
            yield gauge
        for name, text in COUNTERS.items():
            labels = LABELS.get(name, ())
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            counts = {
                key[1:]: count for key, count in self._counts.counts.items() if key[0] == name
            }
            for values, count in (counts or ({(): 0} if not labels else {})).items():
                counter.add_metric(values, count)
            yield counter
