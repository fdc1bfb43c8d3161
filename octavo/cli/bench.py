"""`octavo bench throughput|latency`: measures generation speed on random token ids.

Requests ignore end tokens, so that each run does the same work. Each round has new prompts, so that
there are no prefix cache hits. A short request warms up before the first round. The commands
`serve`, `startup` and `quant` are in other files.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.api.errors import ConfigError, WorkerFailed
from octavo.cli import bench_quant, bench_serve, bench_startup
from octavo.cli.common.command import Command, Group
from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.model import with_local_model
from octavo.tools.bench import roofline
from octavo.tools.bench.kv_use import KvUse
from octavo.tools.bench.percentiles import percentiles
from octavo.utils.progress import quiet

if TYPE_CHECKING:
    from octavo.api.llm import LLM
    from octavo.api.outputs import Profile, RequestOutput

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

Prompts = list[list[int]]


def build_app() -> typer.Typer:
    """Builds the Typer app of `octavo bench`."""
    app = typer.Typer(cls=Group, help="Benchmark a model or a server.", rich_markup_mode=None)
    app.command("throughput", cls=Command)(throughput)
    app.command("latency", cls=Command)(latency)
    app.command("serve", cls=Command)(bench_serve.serve)
    app.command("startup", cls=Command)(bench_startup.startup)
    app.command("quant", cls=Command)(bench_quant.quant)
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


@dataclass(frozen=True, slots=True)
class Workload:
    """Kind ("throughput" or "latency") and sizes of a benchmark."""

    bench: str
    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float
    rounds: int
    seed: int
    shared_prefix_len: int = 0

    def draw_len(self, draw: random.Random, mean: int) -> int:
        """Samples a length within `range_ratio` of the mean."""
        low = max(1, round(mean * (1 - self.range_ratio)))
        return draw.randint(low, round(mean * (1 + self.range_ratio)))


@dataclass(frozen=True, slots=True)
class Round:
    """Results of one round. Times (`_ms`) are percentiles ("p50") in milliseconds."""

    elapsed_s: float
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    request_latency_ms: dict[str, float]
    time_to_first_token_ms: dict[str, float]
    inter_token_ms: dict[str, float]


def _bench(work: Workload, options: dict[str, Any], *, picture: Path | None, json: bool) -> None:
    from octavo.api.llm import LLM

    started = time.monotonic()
    with LLM(**with_local_model(options)) as llm:
        load_s = time.monotonic() - started
        _check_fits(work, llm)
        draw = random.Random(work.seed)
        _warm_up(llm, work, draw)
        before = llm.get_metrics()
        rounds = [_round(llm, work, draw, number) for number in range(1, work.rounds + 1)]
        kv = KvUse.between(llm.config.cache.kv_layout, before, llm.get_metrics())
        settings = {
            "model": llm.config.model.served_model_name,
            "load_s": load_s,
            **asdict(work),
            "engine": asdict(llm.config),
        }
        profile = None if picture is None else _profile(llm, work, draw)
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


def _warm_up(llm: LLM, work: Workload, draw: random.Random) -> None:
    _run(llm, work, [_prompt(draw, llm, 8)], [min(8, work.output_len)])


def _single_steps(work: Workload, options: dict[str, Any]) -> list[Round]:
    """Repeats the rounds with an engine that runs one decode step per call."""
    from octavo.api.llm import LLM

    print("the same with one decode step a call", file=sys.stderr)
    with LLM(**with_local_model(options | {"num_scheduler_steps": 1}), report=quiet) as llm:
        draw = random.Random(work.seed)
        _warm_up(llm, work, draw)
        return [_round(llm, work, draw, number) for number in range(1, work.rounds + 1)]


def _profile(llm: LLM, work: Workload, draw: random.Random) -> Profile:
    """Profiles a separate round, since reading the clock after each op takes time."""
    llm.start_profile()
    _round(llm, work, draw, work.rounds + 1)
    return llm.stop_profile()


def _check_fits(work: Workload, llm: LLM) -> None:
    longest = (
        round(work.input_len * (1 + work.range_ratio)),
        round(work.output_len * (1 + work.range_ratio)),
    )
    needed, allowed = work.shared_prefix_len + sum(longest), llm.info.max_model_len
    if needed > allowed:
        what = (
            "shared_prefix_len + input_len + output_len"
            if work.shared_prefix_len
            else "input_len + output_len"
        )
        raise ConfigError(
            f"{what}: got {needed}, expected at most the context, {allowed}",
            hint="use shorter lengths, or raise max_model_len",
        )


def _round(llm: LLM, work: Workload, draw: random.Random, number: int) -> Round:
    shared = _prompt(draw, llm, work.shared_prefix_len)
    prompts = [
        shared + _prompt(draw, llm, work.draw_len(draw, work.input_len))
        for _ in range(work.num_prompts)
    ]
    output_lens = [work.draw_len(draw, work.output_len) for _ in prompts]
    name = "profile" if number > work.rounds else f"round {number} of {work.rounds}"
    print(f"{name}: {work.num_prompts} prompts", file=sys.stderr)
    started, num_steps = time.monotonic(), llm.get_metrics().num_steps
    outputs = _run(llm, work, prompts, output_lens)
    return _measure(outputs, time.monotonic() - started, llm.get_metrics().num_steps - num_steps)


def _prompt(draw: random.Random, llm: LLM, num_tokens: int) -> list[int]:
    return [draw.randrange(llm.info.vocab_size) for _ in range(num_tokens)]


def _run(
    llm: LLM, work: Workload, prompts: Prompts, output_lens: Sequence[int]
) -> list[RequestOutput]:
    """Returns the outputs; raises WorkerFailed if an output does not have the requested length."""
    from octavo.api.sampling_params import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for num_tokens in output_lens
    ]
    if work.bench == "throughput":
        outputs = llm.generate(prompts, params, use_tqdm=False)
    else:
        outputs = [
            llm.generate(prompt, prompt_params, use_tqdm=False)[0]
            for prompt, prompt_params in zip(prompts, params, strict=True)
        ]
    for output, num_tokens in zip(outputs, output_lens, strict=True):
        output_len = len(output.outputs[0].token_ids)
        if output.error is not None or output_len != num_tokens:
            raise WorkerFailed(
                output.error or f"a request ended after {output_len} tokens, expected {num_tokens}"
            )
    return outputs


def _measure(outputs: Sequence[RequestOutput], elapsed_s: float, num_steps: int) -> Round:
    moments = [output.metrics for output in outputs if output.metrics is not None]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Round(
        elapsed_s=elapsed_s,
        num_steps=num_steps,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_tokens_per_s=prompt_tokens / elapsed_s,
        output_tokens_per_s=output_tokens / elapsed_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / elapsed_s,
        request_latency_ms=percentiles(one.token_times[-1] - one.arrival_time for one in moments),
        time_to_first_token_ms=percentiles(
            one.token_times[0] - one.arrival_time for one in moments
        ),
        inter_token_ms=percentiles(
            later - earlier
            for one in moments
            for earlier, later in itertools.pairwise(one.token_times)
        ),
    )


def _print(
    settings: dict[str, Any],
    rounds: Sequence[Round],
    kv: KvUse,
    profile: Profile | None,
    single_steps: Sequence[Round] | None,
    *,
    json: bool,
) -> None:
    result = {**settings, **_median([asdict(one) for one in rounds]), "kv": asdict(kv)}
    if single_steps is not None:
        result["single_steps"] = _median([asdict(one) for one in single_steps])
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


def _median(
    rounds: Sequence[dict[str, Any]], pick: Callable[[list[float]], float] = statistics.median
) -> dict[str, Any]:
    """Returns the median of each field and each percentile over the rounds."""
    return {
        name: (
            _median([one[name] for one in rounds])
            if isinstance(value, dict)
            else pick([one[name] for one in rounds])
        )
        for name, value in rounds[0].items()
    }
