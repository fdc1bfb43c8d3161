"""Histograms and counts of one model's finished requests; `metrics.py` exports them."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.utils import floatToGoString

from octavo.api.outputs import RequestMetrics, RequestOutput
from octavo.api.pooling_params import RequestParams
from octavo.frontend.output_processor import AbortedRequest

REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
"""Upper bounds of latency buckets in seconds, as in vLLM."""

TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1, 2.5, 5, 10, 40, 160),
)
"""Upper bounds of inter-token latency buckets in seconds."""

TOKEN_COUNTS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
SAMPLE_COUNTS = (1, 2, 5, 10, 20)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", TOKEN_SECONDS),
    "inter_token_latency_seconds": ("Time between consecutive tokens of a request.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": (
        "Mean time per output token of a request.",
        TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": (
        "Time from arrival to the end of the request.",
        REQUEST_SECONDS,
    ),
    "request_queue_time_seconds": (
        "Time in the queue: from arrival to the first step.",
        REQUEST_SECONDS,
    ),
    "request_prefill_time_seconds": (
        "Prefill time: from the first step to the first token.",
        REQUEST_SECONDS,
    ),
    "request_decode_time_seconds": (
        "Decode time: from the first to the last token.",
        REQUEST_SECONDS,
    ),
    "request_inference_time_seconds": (
        "Inference time: from the first step to the last token.",
        REQUEST_SECONDS,
    ),
    "request_prompt_tokens": ("Number of prompt tokens per request.", TOKEN_COUNTS),
    "request_generation_tokens": ("Number of tokens generated.", TOKEN_COUNTS),
    "request_params_n": ("Value of n per request.", SAMPLE_COUNTS),
    "request_params_max_tokens": ("Value of max_tokens per request.", TOKEN_COUNTS),
    "request_num_preemptions": ("Number of preemptions per request.", SAMPLE_COUNTS),
}


class Tally:
    """A histogram.

    prometheus_client's histogram is 10x slower per value, which would delay all streams whenever a
    request ends.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the inclusive upper bounds of the buckets, ascending; the last bucket is
        unbounded.
        """
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Returns (bound, cumulative count) for each bucket, and the sum of all values."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(self._counts), strict=True)), self._sum


class ModelMetrics:
    """Metrics of a model's finished requests."""

    def __init__(self) -> None:
        self.tallies = {name: Tally(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.endings: Counter[str] = Counter()
        """Number of samples by finish_reason."""

    def observe(self, output: RequestOutput, params: RequestParams) -> None:
        """Adds a finished request."""
        for sample in output.outputs:
            self.endings[sample.finish_reason or "error"] += 1
        if output.metrics is not None and output.error is None:
            self._measure(len(output.prompt_token_ids), output.metrics, params)

    def observe_abort(self, lost: AbortedRequest, params: RequestParams) -> None:
        """Adds a request whose client disconnected."""
        self.endings["abort"] += 1
        self._measure(lost.num_prompt_tokens, lost.metrics, params)

    def _measure(
        self, num_prompt_tokens: int, metrics: RequestMetrics, params: RequestParams
    ) -> None:
        for name, values in _measures(num_prompt_tokens, metrics, params, time.monotonic()):
            self.tallies[name].add(values)


def _measures(
    num_prompt_tokens: int, metrics: RequestMetrics, params: RequestParams, now: float
) -> Iterator[tuple[str, Iterable[float]]]:
    yield "e2e_request_latency_seconds", [now - metrics.arrival_time]
    yield "request_prompt_tokens", [num_prompt_tokens]
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
