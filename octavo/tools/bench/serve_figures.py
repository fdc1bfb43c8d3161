"""Metrics of a serving benchmark: latencies, throughput, prefix cache hits and goodput."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.api.errors import ConfigError
from octavo.tools.bench.percentiles import percentiles
from octavo.tools.bench.stream_client import StreamedAnswer
from octavo.tools.bench.traffic import TrafficRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one request: a response or an error."""

    request: TrafficRequest
    late_s: float
    """Seconds between its planned and its actual start."""
    streamed: StreamedAnswer | None = None
    error: str | None = None


def first_token_s(streamed: StreamedAnswer) -> float:
    return streamed.token_times[0] - streamed.sent


def per_token_s(streamed: StreamedAnswer) -> float | None:
    """Returns the mean time per token after the first (TPOT); None if there is only one."""
    later = num_tokens(streamed) - 1
    return (streamed.token_times[-1] - streamed.token_times[0]) / later if later > 0 else None


def longest_gap_s(streamed: StreamedAnswer) -> float | None:
    """Returns the longest inter-token latency; None if all tokens arrived at once."""
    return max(gaps_s(streamed), default=None)


def gaps_s(streamed: StreamedAnswer) -> Iterator[float]:
    """Yields the times between consecutive arrivals of tokens."""
    return (later - earlier for earlier, later in itertools.pairwise(streamed.token_times))


def e2e_latency_s(streamed: StreamedAnswer) -> float:
    return streamed.ended - streamed.sent


def num_tokens(streamed: StreamedAnswer) -> int:
    """Returns the number of tokens from the server's usage, or else the number received."""
    return streamed.num_tokens if streamed.usage is None else streamed.usage.completion_tokens


LIMITS: dict[str, Callable[[StreamedAnswer], float | None]] = {
    "ttft": first_token_s,
    "tpot": per_token_s,
    "itl": longest_gap_s,
    "e2el": e2e_latency_s,
}
"""Latencies that a goodput limit can bound, by vLLM's names; itl bounds the longest gap of a
response.
"""


def parse_goodput(texts: Iterable[str]) -> dict[str, float]:
    """Parses limits in milliseconds, such as "ttft:500 tpot:50"."""
    limits = {}
    for text in itertools.chain.from_iterable(text.split() for text in texts):
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in LIMITS or not limits[name] > 0:
            raise ConfigError(
                f"goodput: got {text!r}, expected NAME:MILLISECONDS of {', '.join(LIMITS)}, such"
                " as ttft:500"
            )
    return limits


def compute_metrics(
    outcomes: Sequence[Outcome], elapsed_s: float, goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Returns all metrics. Times (`_ms`) exclude failed requests."""
    done = [outcome.streamed for outcome in outcomes if outcome.streamed is not None]
    per_token = [seconds for streamed in done if (seconds := per_token_s(streamed)) is not None]
    num_prompt = sum(_num_prompt(outcome) for outcome in outcomes if outcome.streamed is not None)
    num_output = sum(map(num_tokens, done))
    metrics: dict[str, Any] = {
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "elapsed_s": elapsed_s,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_s": len(done) / elapsed_s,
        "prompt_tokens_per_s": num_prompt / elapsed_s,
        "output_tokens_per_s": num_output / elapsed_s,
        "total_tokens_per_s": (num_prompt + num_output) / elapsed_s,
        "time_to_first_token_ms": percentiles(
            first_token_s(streamed) for streamed in done if streamed.token_times
        ),
        "inter_token_ms": percentiles(itertools.chain.from_iterable(map(gaps_s, done))),
        "time_per_output_token_ms": percentiles(per_token),
        "request_latency_ms": percentiles(map(e2e_latency_s, done)),
        "sent_late_ms": percentiles(outcome.late_s for outcome in outcomes),
        "prefix_hit_rate": _hit_rate(done, num_prompt),
        "errors": _errors(outcomes),
    }
    if goodput:
        good = sum(_is_good(streamed, goodput) for streamed in done)
        metrics["goodput"] = {
            "limits_ms": dict(goodput),
            "requests": good,
            "requests_per_s": good / elapsed_s,
            "share": good / len(outcomes),
        }
    return metrics


def table(metrics: Mapping[str, Any], shared: float | None) -> str:
    """Formats the metrics as a table; `shared` is the result of `shared_share`, if known."""
    lines = [
        f"{'completed':26}{metrics['completed']} in {metrics['elapsed_s']:.1f} s, failed"
        f" {metrics['failed']}"
    ]
    for name in ("requests", "prompt_tokens", "output_tokens", "total_tokens"):
        lines.append(f"{name.replace('_', ' ') + '/s':26}{metrics[name + '_per_s']:10.2f}")
    for name in (
        "time_to_first_token_ms",
        "inter_token_ms",
        "time_per_output_token_ms",
        "request_latency_ms",
        "sent_late_ms",
    ):
        lines.append(
            f"{name.replace('_', ' '):26}"
            + "  ".join(f"{key} {value:9.2f}" for key, value in metrics[name].items())
        )
    hit_rate = metrics["prefix_hit_rate"]
    known = (
        ""
        if shared is None
        else f" ({shared:.1%} of the prompt tokens begin an earlier prompt too)"
    )
    lines.append(
        f"{'prefix hit rate':26}"
        + ("the server does not say" if hit_rate is None else f"{hit_rate:.1%}{known}")
    )
    if "goodput" in metrics:
        good = metrics["goodput"]
        limits = ", ".join(f"{name} <= {value:g} ms" for name, value in good["limits_ms"].items())
        lines.append(
            f"{'goodput':26}{good['requests_per_s']:.2f} requests/s, {good['share']:.1%} of all:"
            f" {limits}"
        )
    lines += [
        f"failed {one['count']} times, first {one['first']}: {one['message']}"
        for one in metrics["errors"]
    ]
    return "\n".join(lines)


def _num_prompt(outcome: Outcome) -> int:
    usage = outcome.streamed.usage if outcome.streamed is not None else None
    return outcome.request.input_len if usage is None else usage.prompt_tokens


def _hit_rate(done: Sequence[StreamedAnswer], num_prompt: int) -> float | None:
    details = [
        streamed.usage.prompt_tokens_details for streamed in done if streamed.usage is not None
    ]
    counts = [
        one.cached_tokens for one in details if one is not None and one.cached_tokens is not None
    ]
    return sum(counts) / num_prompt if counts and num_prompt else None


def _is_good(streamed: StreamedAnswer, limits: Mapping[str, float]) -> bool:
    measured = [(LIMITS[name](streamed), limit) for name, limit in limits.items()]
    return all(seconds is None or 1000 * seconds <= limit for seconds, limit in measured)


def _errors(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns each distinct error message, most frequent first, with its first request."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    first = {outcome.error: outcome.request.name for outcome in reversed(failed)}
    counts = Counter(outcome.error for outcome in failed)
    return [
        {"message": message, "count": count, "first": first[message]}
        for message, count in counts.most_common()
    ]
