"""`octavo bench report`: measures this machine and prints a Markdown table to paste into an issue.

The work is the same on every machine: one stream, 32 streams, and one long prompt.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.model import with_local_model
from octavo.tools.bench.rounds import Workload, median, run_profile, run_round, warm_up
from octavo.utils.version import __version__

if TYPE_CHECKING:
    from octavo.api.llm import LLM
    from octavo.api.outputs import Profile

STREAMS = 32
"""Number of concurrent requests of the second measurement."""
LENGTH = 128
"""Prompt and output tokens of each stream, unless the context is shorter."""
PROMPT = 1024
"""Tokens of the long prompt, unless the context is shorter."""


@with_engine_flags(without=("seed",))
def report(
    *,
    rounds: Annotated[int, typer.Option(help="Run N rounds and report the median", min=1)] = 3,
    options: dict[str, Any],
) -> None:
    """Measure this machine and print a Markdown table to paste."""
    from octavo.api.llm import LLM

    with LLM(**with_local_model(options)) as llm:
        speeds = list(_speeds(llm, rounds))
        profile = run_profile(llm, _work(llm, 1, LENGTH, 1, rounds=1), random.Random(1))
        rows = [*_machine(), *_engine(llm), *_ceilings(profile), *speeds]
    print("| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


def _machine() -> Iterator[tuple[str, str]]:
    from octavo.worker.machine import Machine

    machine = Machine()
    yield "CPU", machine.cpu_name()
    yield "cores, NUMA nodes", f"{machine.num_threads()}, {len(machine.nodes())}"
    yield "system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"


def _engine(llm: LLM) -> Iterator[tuple[str, str]]:
    config = llm.config
    yield "Octavo", __version__
    yield "model", str(config.model.served_model_name)
    yield "backend", _backend(llm)
    yield "threads", str(config.backend.threads)


def _backend(llm: LLM) -> str:
    backend = llm.config.backend
    if backend.backend != "native":
        return str(backend.backend)
    from octavo.executor.native.extension import supported_levels

    level = supported_levels()[-1] if backend.cpu_level == "auto" else backend.cpu_level
    return f"native, level {level}"


def _ceilings(profile: Profile) -> Iterator[tuple[str, str]]:
    yield "memory read", f"{profile.bandwidth / 1e9:.1f} GB/s"
    for code, rate in sorted(profile.rates.items()):
        yield f"matmul of {code} weights", f"{rate / 1e9:,.0f} GFLOP/s"
    if profile.hop_s:
        yield "cache line from core to core", f"{profile.hop_s * 1e9:.0f} ns"


def _speeds(llm: LLM, rounds: int) -> Iterator[tuple[str, str]]:
    """Yields the rates of generated tokens, and of the long prompt's tokens."""
    for num_streams in (1, STREAMS):
        work = _work(llm, num_streams, LENGTH, LENGTH, rounds=rounds)
        found = _run(llm, work)
        name = "one stream" if num_streams == 1 else f"{num_streams} streams"
        yield (
            f"{name} of {work.input_len} + {work.output_len} tokens",
            f"{found['output_tokens_per_s']:,.1f} output tokens/s",
        )
    work = _work(llm, 1, PROMPT, 1, rounds=rounds)
    found = _run(llm, work)
    rate = found["prompt_tokens"] / found["time_to_first_token_ms"]["p50"] * 1000
    yield f"prompt of {work.input_len} tokens", f"{rate:,.1f} prompt tokens/s"


def _work(llm: LLM, num_streams: int, input_len: int, output_len: int, *, rounds: int) -> Workload:
    """Returns the work, with shorter lengths if the context is too short for them."""
    output_len = min(output_len, llm.info.max_model_len // 2)
    return Workload(
        "latency" if num_streams == 1 else "throughput",
        num_prompts=num_streams,
        input_len=min(input_len, llm.info.max_model_len - output_len),
        output_len=output_len,
        range_ratio=0.0,
        rounds=rounds,
        seed=0,
    )


def _run(llm: LLM, work: Workload) -> dict[str, Any]:
    draw = random.Random(work.seed)
    warm_up(llm, work, draw)
    return median(
        [asdict(run_round(llm, work, draw, number)) for number in range(1, work.rounds + 1)]
    )
