"""`octavo bench throughput|latency`: measures generation speed on random token ids.

A short request warms up before the first round. The commands `serve`, `startup`, `quant` and
`report` are in other files.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import bench_quant, bench_report, bench_serve, bench_startup
from octavo.cli.common.command import Command, Group
from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.model import with_local_model
from octavo.tools.bench import roofline
from octavo.tools.bench.kv_use import KvUse
from octavo.tools.bench.rounds import (
    Round,
    Workload,
    check_fits,
    median,
    run_profile,
    run_round,
    warm_up,
)
from octavo.utils.progress import quiet

if TYPE_CHECKING:
    from octavo.api.outputs import Profile

NumPrompts = Annotated[int, typer.Option(help="Send N requests per round", min=1)]
InputLen = Annotated[int, typer.Option(help="Use prompts of N tokens", min=1)]
OutputLen = Annotated[int, typer.Option(help="Generate N tokens per request", min=1)]
SharedPrefixLen = Annotated[
    int,
    typer.Option(help="Start every prompt with the same N tokens", min=0),
]
RangeRatio = Annotated[
    float,
    typer.Option(
        help="Vary each length by up to this fraction",
        min=0.0,
        max=0.99,
    ),
]
Rounds = Annotated[int, typer.Option(help="Run N rounds and report the median", min=1)]
Seed = Annotated[int, typer.Option(help="Set the seed of the random prompts")]
Profiled = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Profile each op in an additional round",
    ),
]
Picture = Annotated[Path, typer.Option(help="Plot --profile to this file", dir_okay=False)]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object")]


def build_app() -> typer.Typer:
    """Builds the Typer app of `octavo bench`."""
    app = typer.Typer(cls=Group, help="Benchmark a model or a server.", rich_markup_mode=None)
    app.command("throughput", cls=Command)(throughput)
    app.command("latency", cls=Command)(latency)
    app.command("serve", cls=Command)(bench_serve.serve)
    app.command("startup", cls=Command)(bench_startup.startup)
    app.command("quant", cls=Command)(bench_quant.quant)
    app.command("report", cls=Command)(bench_report.report)
    return app


@with_engine_flags(without=("seed",))
def throughput(
    *,
    num_prompts: NumPrompts = 32,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    shared_prefix_len: SharedPrefixLen = 0,
    range_ratio: RangeRatio = 0.0,
    rounds: Rounds = 1,
    seed: Seed = 0,
    profile: Profiled = False,
    picture: Picture = Path("octavo-profile.svg"),
    json: Json = False,
    options: dict[str, Any],
) -> None:
    """Measure throughput: all requests at once."""
    work = Workload(
        "throughput",
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        rounds=rounds,
        seed=seed,
        shared_prefix_len=shared_prefix_len,
    )
    _bench(work, options, picture=picture if profile else None, json=json)


@with_engine_flags(without=("seed",))
def latency(
    *,
    num_prompts: NumPrompts = 8,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    range_ratio: RangeRatio = 0.0,
    rounds: Rounds = 1,
    seed: Seed = 0,
    profile: Profiled = False,
    picture: Picture = Path("octavo-profile.svg"),
    json: Json = False,
    options: dict[str, Any],
) -> None:
    """Measure latency: one request after another."""
    work = Workload(
        "latency",
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        rounds=rounds,
        seed=seed,
    )
    _bench(work, options, picture=picture if profile else None, json=json)


def _bench(work: Workload, options: dict[str, Any], *, picture: Path | None, json: bool) -> None:
    from octavo.api.llm import LLM

    started = time.monotonic()
    with LLM(**with_local_model(options)) as llm:
        load_s = time.monotonic() - started
        check_fits(work, llm)
        draw = random.Random(work.seed)
        warm_up(llm, work, draw)
        before = llm.get_metrics()
        rounds = [run_round(llm, work, draw, number) for number in range(1, work.rounds + 1)]
        kv = KvUse.between(llm.config.cache.kv_layout, before, llm.get_metrics())
        settings = {
            "model": llm.config.model.served_model_name,
            "load_s": load_s,
            **asdict(work),
            "engine": asdict(llm.config),
        }
        profile = None if picture is None else run_profile(llm, work, draw)
        several_steps = (
            work.bench == "latency" and (llm.config.scheduler.num_scheduler_steps or 1) > 1
        )
    single_steps = _single_steps(work, options) if several_steps else None
    _print(settings, rounds, kv, profile, single_steps, json=json)
    if profile is not None and picture is not None:
        picture.write_text(
            roofline.picture(
                profile,
                f"{settings['model']}: {work.bench}, {work.input_len} + {work.output_len} tokens",
            ),
            encoding="utf-8",
        )
        print(f"picture: {picture}", file=sys.stderr)


def _single_steps(work: Workload, options: dict[str, Any]) -> list[Round]:
    """Repeats the rounds with an engine that runs one decode step per call."""
    from octavo.api.llm import LLM

    print("the same with one decode step a call", file=sys.stderr)
    with LLM(**with_local_model(options | {"num_scheduler_steps": 1}), report=quiet) as llm:
        draw = random.Random(work.seed)
        warm_up(llm, work, draw)
        return [run_round(llm, work, draw, number) for number in range(1, work.rounds + 1)]


def _print(
    settings: dict[str, Any],
    rounds: Sequence[Round],
    kv: KvUse,
    profile: Profile | None,
    single_steps: Sequence[Round] | None,
    *,
    json: bool,
) -> None:
    result = {**settings, **median([asdict(one) for one in rounds]), "kv": asdict(kv)}
    if single_steps is not None:
        result["single_steps"] = median([asdict(one) for one in single_steps])
    if profile is not None:
        result["profile"] = asdict(profile)
    if json:
        import json as json_format

        print(json_format.dumps({**result, "each_round": [asdict(one) for one in rounds]}))
        return
    drawn = f" (within {result['range_ratio']:.0%})" if result["range_ratio"] else ""
    shared = (
        f"{result['shared_prefix_len']} tokens in common and "
        if result["shared_prefix_len"]
        else ""
    )
    lengths = (
        f"{shared}{result['input_len']} tokens and {result['output_len']} new ones each{drawn}"
    )
    print(f"{result['model']}: {result['num_prompts']} prompts of {lengths}")
    for name in ("prompt", "output", "total"):
        print(f"{name + ' tokens/s':24}{result[name + '_tokens_per_s']:10.1f}")
    print(f"{'steps':24}{result['num_steps']:10.0f}")
    for name in ("time_to_first_token_ms", "inter_token_ms", "request_latency_ms"):
        print(
            f"{name.replace('_', ' '):24}"
            + "  ".join(f"{key} {value:8.2f}" for key, value in result[name].items())
        )
    if single_steps is not None:
        single = result["single_steps"]
        moments = "  ".join(
            f"{key} {value:8.2f}" for key, value in single["inter_token_ms"].items()
        )
        print(
            f"{'one step a call':24}{single['output_tokens_per_s']:10.1f} output tokens/s  inter"
            f" token ms {moments}"
        )
    for name, (share, text) in zip(("KV utilisation", ""), kv.lines(), strict=True):
        print(f"{name:24}{share:10.1%}  {text}")
    if profile is not None:
        print(roofline.table(profile))
