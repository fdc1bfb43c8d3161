"""How far the simulated times of `octavo plan --trace` are from those of a real engine.

    python -m benchmarks.simulated [--model smollm2] [--runs 5] [--requests 60]

Lengths are those of the Mooncake conversation trace times 1/32. A first run records what steps cost
on this machine; the rate of arrivals is then the one at which the simulated engine is busy for 70%
of the time. Each run sends the requests to a server and to the simulation. Goals: medians within
10%, p90 within 15%, p99 within the spread of the runs. Prints a JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from benchmarks.compare import machine
from octavo.tools.bench.load import LoadTest, run_load
from octavo.tools.bench.serve_figures import first_token_s, per_token_s
from octavo.tools.bench.started_server import started_server
from octavo.tools.bench.traffic import TrafficRequest, make_prompt, read_trace, schedule_at_rate
from octavo.tools.layout_search import read_engine
from octavo.tools.simulated_fleet import (
    FleetLayout,
    FleetOptionsSimulated,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedRequest,
)

TRACE = Path(__file__).parent / "data" / "mooncake_conversation.jsonl"
SCALE = Fraction(1, 32)
LOAD = 0.7
GOALS = {"p50": 0.10, "p90": 0.15}
LONGEST = 1900
"""Tokens of the longest prompt and answer together that are taken from the trace."""


def served(model: str, record: Path) -> AbstractContextManager[str]:
    """Runs a server that records its steps; yields its URL."""
    sizes = {"max_model_len": 2048, "kv_cache_memory_bytes": "512MiB"}
    return started_server({"model": model, **sizes, "record": str(record)})


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def summary(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Returns the percentiles of times to the first token and between tokens, in seconds."""
    return {
        f"{name} {label}": percentile([row[at] for row in times], share)
        for at, name in enumerate(("ttft", "tpot"))
        for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


def real_times(
    url: str, requests: Sequence[TrafficRequest], seed: int
) -> list[tuple[float, float]]:
    """Sends the requests to a server; returns each one's TTFT and TPOT."""
    _, outcomes, _ = run_load(LoadTest(url, None, None, requests, seed))
    times = []
    for outcome in outcomes:
        if outcome.streamed is None:
            raise SystemExit(f"a request failed: {outcome.error}")
        times.append((first_token_s(outcome.streamed), per_token_s(outcome.streamed) or 0.0))
    return times


def simulated(
    engine: SimulatedEngine, requests: Sequence[TrafficRequest], seed: int
) -> tuple[list[tuple[float, float]], float]:
    """Simulates the requests; returns their times, and the share of the time that was busy."""
    made = [
        SimulatedRequest(request.name, request.at_s, make_prompt(request, seed), request.output_len)
        for request in requests
    ]
    fleet = SimulatedFleet(engine, FleetLayout(1), FleetOptionsSimulated())
    fleet.run(made)
    lasts_s = max(request.end for request in made)
    return [(request.ttft, request.tpot) for request in made], fleet.busy_s[0] / lasts_s


def fitted_rate(engine: SimulatedEngine, requests: Sequence[TrafficRequest]) -> float:
    """Returns the rate of arrivals at which the simulated engine is busy for LOAD of the time."""
    low, high = 0.01, 100.0
    for _ in range(14):
        middle = math.sqrt(low * high)
        _, busy = simulated(engine, schedule_at_rate(requests, middle, 0), 0)
        low, high = (middle, high) if busy < LOAD else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60)
    args = parser.parse_args()
    rows = [
        replace(row, block_ids=())
        for row in read_trace(TRACE, scale=SCALE, num_requests=4 * args.requests)
        if row.input_len + row.output_len <= LONGEST
    ][: args.requests]
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "first.jsonl"
        with served(args.model, first) as url:
            real_times(url, schedule_at_rate(rows, 4.0, 99), 99)
        engine = read_engine(first)
        rate = fitted_rate(engine, rows)
        real, made = [], []
        with served(args.model, Path(folder) / "second.jsonl") as url:
            for run in range(args.runs):
                requests = schedule_at_rate(rows, rate, run)
                real.append(summary(real_times(url, requests, run)))
                made.append(summary(simulated(engine, requests, run)[0]))
    print(json.dumps({"machine": machine(), "rate": round(rate, 3), **compared(real, made)}))


def compared(
    real: Sequence[dict[str, float]], made: Sequence[dict[str, float]]
) -> dict[str, dict[str, object]]:
    """Returns, for each percentile, both medians over the runs, and whether the goal is met."""
    found: dict[str, dict[str, object]] = {}
    for name in real[0]:
        there = [run[name] for run in real]
        here = statistics.median(run[name] for run in made)
        middle = statistics.median(there)
        goal = GOALS.get(name.split()[1])
        found[name] = {
            "real_ms": round(1000 * middle, 1),
            "spread_ms": [round(1000 * min(there), 1), round(1000 * max(there), 1)],
            "simulated_ms": round(1000 * here, 1),
            "off": round(here / middle - 1, 3),
            "met": abs(here / middle - 1) <= goal
            if goal is not None
            else min(there) <= here <= max(there),
        }
    return found


if __name__ == "__main__":
    main()
