"""`octavo bench serve`: how a server fares under traffic, over HTTP with streaming: a trace's
requests, or synthetic ones.

Each request is sent at its moment, whatever became of the others. The server is one that runs
already (--url), or one that is started for it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.flags import with_engine_flags
from octavo.cli.model import fetched
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.cli.traffic import Ask

KEY_VARIABLE = "OCTAVO_API_KEY"
DEFAULT_NUM_REQUESTS = 100
DEFAULT_LEN = 128

Trace = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines of timestamp (ms), input_length, output_length, hash_ids; else synthetic."
    ),
]
Scale = Annotated[
    str, typer.Option(help="Of the trace's lengths and blocks, such as 1/32.", metavar="FRACTION")
]
TimeScale = Annotated[
    float | None, typer.Option(help="Of the trace's times: 0.5 sends twice as fast.")
]
Url = Annotated[
    str | None,
    typer.Option(help="A server that runs; default one of the benchmark's own.", metavar="URL"),
]
ApiKey = Annotated[
    str | None, typer.Option(help=f"Key for --url; default ${KEY_VARIABLE}.", metavar="KEY")
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        "--num-requests", "--num-prompts", help="The first so many; default all, or 100.", min=1
    ),
]
RequestRate = Annotated[
    float | None,
    typer.Option(help="Requests per second, Poisson, in place of the trace's times; default inf."),
]
MaxConcurrency = Annotated[
    int | None, typer.Option(help="Most requests under way; others are sent later.", min=1)
]
InputLen = Annotated[
    int | None, typer.Option(help="Tokens of a synthetic prompt; default 128.", min=1)
]
OutputLen = Annotated[
    int | None, typer.Option(help="Tokens of a synthetic answer; default 128.", min=1)
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        help="Limits in ms for requests that count: ttft:500 tpot:50 e2el:2000.", metavar="LIMIT"
    ),
]
MoreGoodput = Annotated[
    list[str] | None,
    typer.Argument(help="More limits of --goodput.", metavar="LIMIT", show_default=False),
]
Seed = Annotated[int, typer.Option(help="Seed of the prompts and of Poisson's moments.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


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
    max_concurrency: MaxConcurrency = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    goodput: Goodput = None,
    seed: Seed = 0,
    json: Json = False,
    options: dict[str, Any],
) -> None:
    """Requests over HTTP at their moments, answers as streams: latencies, throughput, prefix hits,
    goodput.
    """
    from octavo.cli.load import Load, run_load
    from octavo.cli.own_server import own_server
    from octavo.cli.serve_figures import figures, parse_goodput, table
    from octavo.cli.traffic import at_rate, parse_scale, read_trace, shared_share, synthetic

    _check(
        trace,
        scale=scale,
        time_scale=time_scale,
        request_rate=request_rate,
        input_len=input_len,
        output_len=output_len,
    )
    if more_goodput and not goodput:
        raise ConfigError(
            f"got {more_goodput[0]!r}, which belongs to no option",
            hint=f"--model {more_goodput[0]}, or --goodput ttft:500",
        )
    limits = parse_goodput([*(goodput or ()), *(more_goodput or ())])
    if trace is None:
        sizes = {"input_len": input_len or DEFAULT_LEN, "output_len": output_len or DEFAULT_LEN}
        asks = at_rate(
            synthetic(num_requests=num_requests or DEFAULT_NUM_REQUESTS, **sizes),
            request_rate or math.inf,
            seed,
        )
    else:
        asks = read_trace(trace, scale=parse_scale(scale), num_requests=num_requests)
        asks = (
            at_rate(asks, request_rate, seed)
            if request_rate
            else _stretched(asks, time_scale or 1.0)
        )
    if url is not None and (given := [name for name in options if name != "model"]):
        raise ConfigError(
            f"{given[0]}: an option of the engine, which runs at --url already",
            hint="give it to that server",
        )
    server = own_server(fetched(options)) if url is None else nullcontext(url)
    with server as address:
        key = (api_key or os.environ.get(KEY_VARIABLE)) if url else None
        load = Load(
            address, key, None if url is None else options.get("model"), asks, seed, max_concurrency
        )
        model, outcomes, elapsed_s = run_load(load)
    found = figures(outcomes, elapsed_s, limits)
    shared = shared_share(asks) if any(ask.block_ids for ask in asks) else None
    if json:
        import json as json_format

        settings = {
            "model": model,
            "url": address,
            "trace": None if trace is None else str(trace),
            "scale": scale,
            "seed": seed,
        }
        print(
            json_format.dumps(
                {**settings, "num_requests": len(asks), "shared_share": shared, **found}
            )
        )
    else:
        print(
            f"{model} at {address}: {len(asks)} requests over {asks[-1].at_s:.1f} s"
            + (f" of {trace}, scale {scale}" if trace else "")
        )
        print(table(found, shared))
    if not found["completed"]:
        print("octavo: every request failed", file=sys.stderr)
        raise typer.Exit(1)


def _stretched(asks: Sequence[Ask], factor: float) -> list[Ask]:
    from dataclasses import replace

    return [replace(ask, at_s=ask.at_s * factor) for ask in asks]


def _check(
    trace: Path | None,
    *,
    scale: str,
    time_scale: float | None,
    request_rate: float | None,
    input_len: int | None,
    output_len: int | None,
) -> None:
    """Options that are out of their range, or at odds with each other."""
    for name, value in (("request_rate", request_rate), ("time_scale", time_scale)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: got {value:g}, allowed is a number above 0")
    if request_rate is not None and time_scale is not None:
        raise ConfigError(
            "time_scale: allowed only without request_rate, which replaces the trace's times"
        )
    if trace is None and (scale != "1" or time_scale is not None):
        raise ConfigError(f"{'scale' if scale != '1' else 'time_scale'}: allowed only with --trace")
    if trace is not None and (input_len or output_len):
        raise ConfigError(
            f"{'input_len' if input_len else 'output_len'}: allowed only without --trace, whose"
            " lengths it would replace"
        )
