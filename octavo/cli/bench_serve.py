"""`octavo bench serve`: measures a server under load, over streaming HTTP.

Requests come from a trace or are synthetic; each is sent at its scheduled time, independent of the
others. The server is already running (--url) or started for the benchmark.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.api.errors import ConfigError
from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.model import with_local_model

if TYPE_CHECKING:
    from octavo.tools.bench.serve_figures import Outcome
    from octavo.tools.bench.traffic import TrafficRequest

KEY_VARIABLE = "OCTAVO_API_KEY"
DEFAULT_NUM_REQUESTS = 100
DEFAULT_LEN = "128"

Trace = Annotated[
    Path | None,
    typer.Option(help="Replay this trace (Mooncake format)", show_default="synthetic"),
]
Scale = Annotated[
    str,
    typer.Option(help="Scale lengths and blocks of the trace, e.g. 1/32", metavar="FRACTION"),
]
TimeScale = Annotated[
    float | None, typer.Option(help="Scale the arrival times of the trace (0.5: twice as fast)")
]
Url = Annotated[
    str | None,
    typer.Option(help="Measure this server", show_default="a new one", metavar="URL"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(help="Send this API key to --url", show_default=f"${KEY_VARIABLE}", metavar="KEY"),
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        "--num-requests",
        "--num-prompts",
        help="Send at most N requests",
        show_default="all, or 100",
        min=1,
    ),
]
RequestRate = Annotated[
    float | None,
    typer.Option(help="Send N requests per second (Poisson)", show_default="inf"),
]
Burstiness = Annotated[
    float | None,
    typer.Option(help="Set the burstiness (below 1: bursts, above: even)", show_default="1"),
]
MaxConcurrency = Annotated[int | None, typer.Option(help="Run at most N requests at once", min=1)]
InputLen = Annotated[
    str | None,
    typer.Option(help="Use prompts of N tokens, or a range: 64-2048", show_default="128"),
]
OutputLen = Annotated[
    str | None,
    typer.Option(help="Generate N tokens, or a range: 16-256", show_default="128"),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        help="Count requests within these limits in ms, e.g. ttft:500 tpot:50",
        metavar="LIMIT",
    ),
]
MoreGoodput = Annotated[
    list[str] | None,
    typer.Argument(help="Further limits for --goodput", metavar="LIMIT", show_default=False),
]
Plot = Annotated[
    str | None,
    typer.Option(
        help="Plot the results to this SVG file (-: in the terminal)",
        metavar="FILE",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed prompts, lengths and arrival times")]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object")]


@with_engine_flags(without=("seed",))
def serve(
    *,
    more_goodput: MoreGoodput = None,
    trace: Trace = None,
    scale: Scale = "1",
    time_scale: TimeScale = None,
    url: Url = None,
    api_key: ApiKey = None,
    num_requests: NumRequests = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = None,
    max_concurrency: MaxConcurrency = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    goodput: Goodput = None,
    plot: Plot = None,
    seed: Seed = 0,
    json: Json = False,
    options: dict[str, Any],
) -> None:
    """Measure a server with timed streaming requests. Reports latency, throughput, prefix cache hit
    rate and goodput.
    """
    from octavo.tools.bench.load import LoadTest, run_load
    from octavo.tools.bench.serve_figures import compute_metrics, parse_goodput
    from octavo.tools.bench.started_server import started_server

    if more_goodput and not goodput:
        raise ConfigError(
            f"unexpected argument {more_goodput[0]!r}",
            hint=f"use --model {more_goodput[0]} for a model, or --goodput ttft:500 for a limit",
        )
    limits = parse_goodput([*(goodput or ()), *(more_goodput or ())])
    traffic = TrafficOptions(
        trace=trace,
        scale=scale,
        time_scale=time_scale,
        num_requests=num_requests,
        request_rate=request_rate,
        burstiness=burstiness,
        input_len=input_len,
        output_len=output_len,
        seed=seed,
    )
    _check_plot(plot, json=json)
    requests = traffic.requests()
    if url is not None and (given := [name for name in options if name != "model"]):
        raise ConfigError(
            f"{given[0]}: an engine option, but the server at --url is already running",
            hint="set it on that server",
        )
    server = started_server(with_local_model(options)) if url is None else nullcontext(url)
    with server as address:
        key = (api_key or os.environ.get(KEY_VARIABLE)) if url else None
        name = options.get("model") if url else None
        model, outcomes, elapsed_s = run_load(
            LoadTest(address, key, name, requests, seed, max_concurrency)
        )
    metrics = compute_metrics(outcomes, elapsed_s, limits)
    _print(model, address, traffic, requests, metrics, json=json)
    if plot is not None:
        _draw(plot, outcomes, limits)
    if not metrics["completed"]:
        print("octavo: every request failed", file=sys.stderr)
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Options that select the requests and their times."""

    trace: Path | None
    scale: str
    time_scale: float | None
    num_requests: int | None
    request_rate: float | None
    burstiness: float | None
    input_len: str | None
    output_len: str | None
    seed: int

    def requests(self) -> list[TrafficRequest]:
        """Builds the requests; raises ConfigError for invalid options."""
        from octavo.tools.bench.traffic import (
            make_mixed,
            parse_lengths,
            parse_scale,
            read_trace,
            schedule_at_rate,
        )

        self._check()
        burstiness = self.burstiness or 1.0
        if self.trace is None:
            requests = make_mixed(
                self.num_requests or DEFAULT_NUM_REQUESTS,
                parse_lengths("input_len", self.input_len or DEFAULT_LEN),
                parse_lengths("output_len", self.output_len or DEFAULT_LEN),
                seed=self.seed,
            )
            return schedule_at_rate(requests, self.request_rate or math.inf, self.seed, burstiness)
        requests = read_trace(
            self.trace, scale=parse_scale(self.scale), num_requests=self.num_requests
        )
        if self.request_rate:
            return schedule_at_rate(requests, self.request_rate, self.seed, burstiness)
        factor = self.time_scale or 1.0
        return [replace(request, at_s=request.at_s * factor) for request in requests]

    def _check(self) -> None:
        """Raises ConfigError for options that are out of range or in conflict."""
        for name in ("request_rate", "time_scale"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: got {value:g}, expected a number above 0")
        self._check_burstiness()
        if self.request_rate is not None and self.time_scale is not None:
            raise ConfigError(
                "time_scale: not supported with request_rate, which replaces the trace's arrival"
                " times"
            )
        of_trace = {"scale": self.scale != "1", "time_scale": self.time_scale is not None}
        if self.trace is None and (
            given := [name for name, is_given in of_trace.items() if is_given]
        ):
            raise ConfigError(f"{given[0]}: requires --trace")
        if self.trace is not None and (self.input_len or self.output_len):
            name = "input_len" if self.input_len else "output_len"
            raise ConfigError(f"{name}: not supported with --trace, which sets the lengths")

    def _check_burstiness(self) -> None:
        from octavo.tools.bench.traffic import BURSTINESS

        low, high = BURSTINESS
        if self.burstiness is None:
            return
        if not low <= self.burstiness <= high:
            raise ConfigError(
                f"burstiness: got {self.burstiness:g}, expected a number from {low:g} to {high:g}"
            )
        if self.request_rate is None:
            raise ConfigError("burstiness: requires --request-rate")


def _check_plot(plot: str | None, *, json: bool) -> None:
    """Raises ConfigError for an invalid --plot before anything is measured."""
    if plot is None:
        return
    if plot == "-":
        if json:
            raise ConfigError("plot: got -, not supported with --json", hint="--plot run.svg")
        return
    path = Path(plot)
    if path.suffix != ".svg" or not path.parent.is_dir():
        raise ConfigError(
            f"plot: got {plot!r}, expected an .svg file in an existing directory, or -"
        )


def _draw(plot: str, outcomes: Sequence[Outcome], limits: dict[str, float]) -> None:
    from octavo.tools.bench.serve_plot import make_plot
    from octavo.tools.bench.serve_plot_svg import picture
    from octavo.tools.bench.serve_plot_text import lines

    drawn = make_plot(outcomes, limits)
    if plot == "-":
        import shutil

        print(lines(drawn, shutil.get_terminal_size().columns, sys.stdout.encoding))
        return
    try:
        Path(plot).write_text(picture(drawn), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"plot: cannot write {plot}: {error.strerror}") from error


def _print(
    model: str,
    address: str,
    traffic: TrafficOptions,
    requests: Sequence[TrafficRequest],
    metrics: dict[str, Any],
    *,
    json: bool,
) -> None:
    from octavo.tools.bench.serve_figures import table
    from octavo.tools.bench.traffic import shared_share

    has_blocks = any(request.block_ids for request in requests)
    shared = shared_share(requests) if has_blocks else None
    if json:
        import json as json_format

        settings = {
            "model": model,
            "url": address,
            "trace": None if traffic.trace is None else str(traffic.trace),
            "scale": traffic.scale,
            "seed": traffic.seed,
            "request_rate": traffic.request_rate,
            "burstiness": traffic.burstiness,
            "num_requests": len(requests),
            "shared_share": shared,
        }
        print(json_format.dumps({**settings, **metrics}))
        return
    of_trace = f" of {traffic.trace}, scale {traffic.scale}" if traffic.trace else ""
    lasting = f"{len(requests)} requests over {requests[-1].at_s:.1f} s"
    print(f"{model} at {address}: {lasting}{of_trace}")
    print(table(metrics, shared))
