"""A step budget in time beside one in tokens: what running requests wait between two tokens while
others' prompts come, and what that costs of the throughput.

    python benchmarks/itl_target.py --rounds 5

A server without a target first decodes 64 rows alone: the median time between their tokens is a
decode step. A second server gets `--itl-target-ms` of twice that. Then both serve the same requests
in turns: 64 clients that send one request after the other, with prompts of 64 to 1,024 and outputs
of 32 to 128 tokens, prefix caching off. Prints a JSON line per run, and last the p99 between tokens
over the target (aim: at most 1.3) and the share of tokens/s that is left (aim: at least 0.9), the
medians of the rounds. Nothing else should run on the machine.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

from compare import machine

from octavo.tools.bench.load import LoadTest, run_load
from octavo.tools.bench.percentiles import percentiles
from octavo.tools.bench.serve_figures import Outcome
from octavo.tools.bench.started_server import started_server
from octavo.tools.bench.traffic import TrafficRequest, make_synthetic

CLIENTS = 64
ENGINE_OPTIONS = {"enable_prefix_caching": False}
DECODE_TOKENS = 96
SETTLED = 16
"""Tokens of each stream before those that the decode step is measured by: prompts still come."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--options", default="{}", help="JSON of the engine's options")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    args = parser.parse_args()
    options = {"model": args.model, **ENGINE_OPTIONS, **json.loads(args.options)}
    requests = mixed(args.requests)
    print(json.dumps({"machine": machine(), "load": os.getloadavg(), **vars(args)}), flush=True)
    with started_server(options) as tokens_url:
        step_ms = decode_step_ms(tokens_url, args.clients)
        target_ms = round(2 * step_ms, 1)
        print(json.dumps({"decode_step_ms": round(step_ms, 2), "target_ms": target_ms}))
        with started_server({**options, "itl_target_ms": target_ms}) as time_url:
            urls = {"tokens": tokens_url, "time": time_url}
            compare(urls, requests, args.clients, args.rounds, target_ms)


def compare(
    urls: dict[str, str],
    requests: list[TrafficRequest],
    clients: int,
    rounds: int,
    target_ms: float,
) -> None:
    """Serves the requests by both budgets in turns, after a round that is not counted: steps of all
    sizes have been measured then.
    """
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        for budget, url in urls.items():
            row = serve(url, requests, clients, seed=number)
            print(json.dumps({"round": number, "budget": budget, **row}), flush=True)
            if number:
                found[budget].append(row)
    p99 = statistics.median(row["inter_token_p99_ms"] for row in found["time"])
    rates = {
        budget: statistics.median(row["tokens_per_s"] for row in rows)
        for budget, rows in found.items()
    }
    summary = {
        "p99_over_target": round(p99 / target_ms, 3),
        "throughput_left": round(rates["time"] / rates["tokens"], 3),
    }
    print(json.dumps(summary))


def mixed(count: int) -> list[TrafficRequest]:
    """Returns requests of many sizes, the same in each run."""
    draw = random.Random(0)
    return [
        TrafficRequest(f"request {index}", 0.0, draw.randint(64, 1024), draw.randint(32, 128))
        for index in range(count)
    ]


def decode_step_ms(url: str, clients: int) -> float:
    """Returns the median time between two tokens while all rows decode."""
    requests = make_synthetic(num_requests=clients, input_len=16, output_len=DECODE_TOKENS)
    _, outcomes, _ = run_load(LoadTest(url, None, None, requests))
    return 1000 * statistics.median(gaps_of(outcomes, SETTLED))


def serve(url: str, requests: list[TrafficRequest], clients: int, seed: int) -> dict[str, Any]:
    """Returns the figures of one run."""
    test = LoadTest(url, None, None, requests, seed=seed, max_concurrency=clients)
    _, outcomes, elapsed_s = run_load(test)
    if failed := [outcome.error for outcome in outcomes if outcome.error]:
        raise SystemExit(f"{len(failed)} requests failed, the first: {failed[0]}")
    num_tokens = sum(request.input_len + request.output_len for request in requests)
    gaps = percentiles(gaps_of(outcomes))
    return {
        "tokens_per_s": round(num_tokens / elapsed_s, 1),
        "inter_token_p50_ms": round(gaps["p50"], 2),
        "inter_token_p99_ms": round(gaps["p99"], 2),
        "at": time.strftime("%H:%M:%S"),
    }


def gaps_of(outcomes: list[Outcome], first: int = 0) -> list[float]:
    """Returns the seconds between two tokens of a stream, of all streams, from a token on."""
    return [
        later - earlier
        for outcome in outcomes
        if outcome.streamed
        for earlier, later in pairwise(outcome.streamed.token_times[first:])
    ]


if __name__ == "__main__":
    main()
