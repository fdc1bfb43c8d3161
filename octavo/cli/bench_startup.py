"""`octavo bench startup`: measures time to first token and memory of `octavo run` and `octavo
serve`, from process start.

The first run only fills the page cache and is not counted. Memory is the proportional set size
(Pss) of the process tree at the first token; beyond the weights it contains Python, buffers and the
KV blocks of the prompt. The machine should be idle.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.api.errors import BackendUnavailable, WorkerFailed
from octavo.cli.common.flags import with_engine_flags
from octavo.cli.common.model import with_local_model

PROMPT = "Name the capital of France."

Prompt = Annotated[str, typer.Option(help="Use this prompt")]
Rounds = Annotated[int, typer.Option(help="Start each command N times", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON object")]


@dataclass(frozen=True, slots=True)
class StartupSample:
    """One start: time to first token, and the process tree's memory at that time."""

    first_token_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Startup:
    """Statistics of one command's starts; memory and `first_token_s` are medians."""

    command: str
    first_token_s: float
    fastest_s: float
    slowest_s: float
    memory_bytes: int
    beyond_weights_bytes: int

    @staticmethod
    def of(command: str, samples: Sequence[StartupSample], weight_bytes: int) -> Startup:
        times = [sample.first_token_s for sample in samples]
        memory_bytes = int(statistics.median(sample.memory_bytes for sample in samples))
        return Startup(
            command,
            first_token_s=statistics.median(times),
            fastest_s=min(times),
            slowest_s=max(times),
            memory_bytes=memory_bytes,
            beyond_weights_bytes=memory_bytes - weight_bytes,
        )


@with_engine_flags(without=("seed",))
def startup(
    *, prompt: Prompt = PROMPT, rounds: Rounds = 5, json: Json = False, options: dict[str, Any]
) -> None:
    """Measure the time from the start of `octavo run` and `octavo serve` to the first token, and
    their memory beyond the weights.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        raise BackendUnavailable(
            "bench startup: this system has no /proc/PID/smaps_rollup",
            hint="memory can be measured on Linux only",
        )
    options = with_local_model(options)
    weight_bytes = _weight_bytes(options)
    _run(options, prompt)
    runs = [_run(options, prompt) for _ in range(rounds)]
    serves = [_serve(options, prompt) for _ in range(rounds)]
    startups = [Startup.of("run", runs, weight_bytes), Startup.of("serve", serves, weight_bytes)]
    if json:
        import json as json_format

        result = {
            "model": options["served_model_name"],
            "rounds": rounds,
            "weight_bytes": weight_bytes,
        }
        print(json_format.dumps(result | {one.command: asdict(one) for one in startups}))
        return
    mebibyte = 1 << 20
    print(
        f"{options['served_model_name']}: packed weights {weight_bytes / mebibyte:.0f} MiB,"
        f" {rounds} starts of each command"
    )
    for one in startups:
        times = (
            f"first token after {one.first_token_s:.2f} s ({one.fastest_s:.2f} to"
            f" {one.slowest_s:.2f})"
        )
        print(
            f"octavo {one.command:6} {times}, memory {one.memory_bytes / mebibyte:.0f} MiB", end=""
        )
        print(f", {one.beyond_weights_bytes / mebibyte:.0f} beyond the weights")


def _weight_bytes(options: dict[str, Any]) -> int:
    from octavo.config.engine_config import EngineConfig
    from octavo.wiring.plan import plan_model
    from octavo.worker.machine import Machine

    model_plan = plan_model(
        EngineConfig.from_options(**options), memory_bytes=Machine().available_bytes() or 0
    )
    return model_plan.capacity.weight_bytes


def _run(options: dict[str, Any], prompt: str) -> StartupSample:
    """Measures one `octavo run`.

    The process is suspended at its first output, so that its memory is measured at that time.
    """
    from octavo.tools.bench.started_server import shell_flags, start_command

    flags = [flag for name, value in options.items() for flag in shell_flags(name, value)]
    started = time.perf_counter()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with start_command("run", *flags, "--", prompt, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        first_token_s = time.perf_counter() - started
        if not first:
            said = process.communicate()[1].decode(errors="replace").strip()
            raise WorkerFailed(f"octavo run ended with exit code {process.returncode}: {said}")
        process.send_signal(signal.SIGSTOP)
        memory_bytes = tree_bytes(process.pid)
        process.kill()
    return StartupSample(first_token_s, memory_bytes)


def _serve(options: dict[str, Any], prompt: str) -> StartupSample:
    """Measures one `octavo serve`; the request is sent as soon as the server is ready."""
    import asyncio

    import msgspec

    from octavo.tools.bench.started_server import started_server
    from octavo.tools.bench.stream_client import StreamClient

    body = {
        "model": options["served_model_name"],
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started = time.perf_counter()
    with started_server(options) as url:
        streamed = asyncio.run(
            StreamClient(url, None).complete(msgspec.json.encode(body | {"return_token_ids": True}))
        )
        memory_bytes = sum(map(tree_bytes, _children(os.getpid())))
        return StartupSample(streamed.token_times[0] - started, memory_bytes)


def tree_bytes(pid: int) -> int:
    """Returns the memory of a process and all its descendants; shared pages are counted once."""
    return _own_bytes(pid) + sum(map(tree_bytes, _children(pid)))


def _own_bytes(pid: int) -> int:
    """Returns the Pss of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _children(pid: int) -> Iterator[int]:
    """Yields the ids of child processes started by any thread of a process."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, task.read_text().split())
