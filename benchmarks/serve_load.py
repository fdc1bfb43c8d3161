"""Latency under load: the same traffic against several servers, in turns, each with rising rates.

    python benchmarks/serve_load.py --clients 16 --traffic poisson --traffic bursty \\
        --rate 0.5 --rate 1 --rate 2 --rate 4 \\
        --server 'octavo|as packed|smollm2|{}' \\
        --server 'llamacpp|Q4_1|GGUF_FILE|{"binary": "PATH/llama-server"}' \\
        --server 'vllm|bf16|MODEL_DIRECTORY|{}|PYTHON_OF_ITS_OWN'

engines/servers.py says what a server is. `poisson` and `bursty` send synthetic prompts of 64 to
2,048 tokens and answers of 16 to 256, each doubling as likely as any other; `trace` sends those of
--trace, a file in the format of Mooncake's traces, at its own times stretched to the rate, its
lengths scaled and held in the same bounds. At most --clients requests are under way; a later one
waits for its turn, and its times count from there. Each round starts every server once. A request
is good whose first token comes within 1 s and whose longest gap between tokens is 100 ms. A server
whose share of good requests falls below --enough is offered no higher rate.

Prints a JSON line per load and, last, for each traffic, number of clients and server the most good
requests a second in a round, and the highest rate at which 90% are good. Nothing else should run on
the machine.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from compare import machine
from engines.servers import Needs, Server

from octavo.api.errors import OctavoError
from octavo.tools.bench.load import LoadTest, run_load
from octavo.tools.bench.serve_figures import compute_metrics
from octavo.tools.bench.traffic import (
    Lengths,
    TrafficRequest,
    make_mixed,
    read_trace,
    schedule_at_rate,
)

GOOD = {"ttft": 1000.0, "itl": 100.0}
BURSTINESS = {"poisson": 1.0, "bursty": 0.2}
KINDS = (*BURSTINESS, "trace")
MOSTLY = 0.9
SHOWN = ("completed", "failed", "elapsed_s", "requests_per_s", "output_tokens_per_s")
TIMES = ("time_to_first_token_ms", "inter_token_ms", "request_latency_ms", "sent_late_ms")


@dataclass(frozen=True)
class Load:
    traffic: str
    clients: int
    rate: float
    seed: int


@dataclass(frozen=True)
class Plan:
    """The traffic that every server gets."""

    inputs: Lengths
    outputs: Lengths
    trace: tuple[TrafficRequest, ...]
    seconds: float
    fewest: int

    def requests(self, load: Load) -> list[TrafficRequest]:
        """Returns about `seconds` of requests; the same for the same load."""
        count = max(self.fewest, round(load.rate * self.seconds))
        if load.traffic == "trace":
            return stretched(self.trace[:count], load.rate)
        requests = make_mixed(count, self.inputs, self.outputs, seed=load.seed)
        return schedule_at_rate(requests, load.rate, load.seed, BURSTINESS[load.traffic])


def stretched(requests: Sequence[TrafficRequest], rate: float) -> list[TrafficRequest]:
    """Returns requests whose times are stretched to a mean rate; bursts stay bursts."""
    lasts_s = requests[-1].at_s - requests[0].at_s
    factor = len(requests) / rate / lasts_s if lasts_s else 0.0
    began = requests[0].at_s
    return [replace(request, at_s=(request.at_s - began) * factor) for request in requests]


def bounded(
    path: Path, scale: Fraction, inputs: Lengths, outputs: Lengths
) -> Iterator[TrafficRequest]:
    """Yields a trace's requests with scaled lengths: prompts below the bounds are left out, longer
    ones cut; answers are held in theirs.
    """
    for request in read_trace(path, scale=scale):
        if request.input_len >= inputs.low:
            yield replace(
                request,
                input_len=min(request.input_len, inputs.high),
                output_len=min(max(request.output_len, outputs.low), outputs.high),
            )


def read_bounded(
    path: Path, scale: Fraction, inputs: Lengths, outputs: Lengths
) -> tuple[TrafficRequest, ...]:
    """Returns a trace's requests within the bounds; ends with a sentence where it is unfit."""
    try:
        return tuple(bounded(path, scale, inputs, outputs))
    except OctavoError as error:
        raise SystemExit(str(error)) from error


def main() -> None:
    args = arguments()
    inputs = Lengths(*args.input_len)
    outputs = Lengths(*args.output_len)
    trace = read_bounded(args.trace, args.scale, inputs, outputs) if args.trace else ()
    kinds = args.traffic or ["poisson", "bursty", *(["trace"] if trace else [])]
    if "trace" in kinds and not trace:
        raise SystemExit("--traffic trace: needs --trace with prompts within --input-len")
    plan = Plan(inputs, outputs, trace, args.seconds, args.fewest)
    rates = sorted(args.rate or [0.5, 1.0, 2.0, 4.0])
    settings = {"good_ms": GOOD, "input_len": args.input_len, "output_len": args.output_len}
    head = {"machine": machine(), "load": os.getloadavg(), **settings, "rates": rates}
    print(json.dumps(head), flush=True)
    rows: list[dict[str, Any]] = []
    for round_number in range(args.rounds):
        grid = [(kind, clients) for kind in kinds for clients in args.clients or [16, 64]]
        for server in args.server:
            needs = Needs(max(clients for _, clients in grid), inputs.high + outputs.high)
            with server.running(needs) as url:
                for kind, clients in grid:
                    for row in sweep(plan, url, kind, clients, rates, round_number, args.enough):
                        who = {"engine": server.name, "format": server.format}
                        rows.append({"round": round_number, **who, **row})
                        print(json.dumps(rows[-1]), flush=True)
    for summary in summaries(rows):
        print(json.dumps(summary))


def sweep(
    plan: Plan,
    url: str,
    kind: str,
    clients: int,
    rates: list[float],
    round_number: int,
    enough: float,
) -> Iterator[dict[str, Any]]:
    """Yields the figures at each rate, up to the first at which too few requests are good."""
    for index, rate in enumerate(rates):
        # Other prompts for each kind of traffic: a prefix cache would know them.
        seed = 1000 * round_number + 100 * KINDS.index(kind) + 10 * index + (clients > 16)
        load = Load(kind, clients, rate, seed)
        requests = plan.requests(load)
        try:
            _, outcomes, elapsed_s = run_load(LoadTest(url, None, None, requests, seed, clients))
        except OctavoError as error:
            raise SystemExit(f"{url}: {error}") from error
        found = compute_metrics(outcomes, elapsed_s, GOOD)
        asked = {"traffic": kind, "clients": clients, "rate": rate, "requests": len(requests)}
        shown = {name: rounded(found[name]) for name in (*SHOWN, *TIMES)}
        good = {name: rounded(found["goodput"][name]) for name in ("requests_per_s", "share")}
        yield {
            **asked,
            **shown,
            "good": good,
            "errors": found["errors"],
            "at": time.strftime("%H:%M:%S"),
        }
        if good["share"] < enough:
            return


def summaries(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields, for each traffic and number of clients, what each server reached."""
    groups: dict[tuple[Any, ...], dict[int, list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        key = (row["traffic"], row["clients"], row["engine"], row["format"])
        groups[key][row["round"]].append(row)
    for (traffic, clients, engine, form), rounds in sorted(groups.items()):
        best = [max(one, key=lambda row: row["good"]["requests_per_s"]) for one in rounds.values()]
        good = [row["good"]["requests_per_s"] for row in best]
        met = [
            max((row["rate"] for row in one if row["good"]["share"] >= MOSTLY), default=0.0)
            for one in rounds.values()
        ]
        yield {
            "traffic": traffic,
            "clients": clients,
            "engine": engine,
            "format": form,
            "good_requests_per_s": spread(good),
            "inter_token_p99_ms": spread([row["inter_token_ms"].get("p99", 0.0) for row in best]),
            "rate_with_90_percent_good": spread(met),
        }


def spread(values: list[float]) -> dict[str, float]:
    middle = round(statistics.median(values), 3)
    return {"median": middle, "min": min(values), "max": max(values)}


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, 3)


def lengths(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected LOW-HIGH such as 64-2048")
    return int(low), int(high)


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0")
    return value


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", type=Server.parse, action="append", required=True)
    parser.add_argument("--rounds", type=at_least_one, default=1)
    parser.add_argument("--clients", type=at_least_one, action="append", help="default 16 and 64")
    parser.add_argument("--traffic", choices=[*BURSTINESS, "trace"], action="append")
    parser.add_argument("--rate", type=above_zero, action="append", help="requests a second")
    parser.add_argument("--seconds", type=above_zero, default=30.0, help="of each load")
    parser.add_argument("--fewest", type=at_least_one, default=24, help="requests of a load")
    parser.add_argument("--enough", type=float, default=0.5, help="share of good requests")
    parser.add_argument("--input-len", type=lengths, default=(64, 2048))
    parser.add_argument("--output-len", type=lengths, default=(16, 256))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 16))
    return parser.parse_args()


if __name__ == "__main__":
    main()
