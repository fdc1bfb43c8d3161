"""`octavo bench startup`: how long `octavo run` and `octavo serve` take from their start to the
first token, and what memory they take.

Each is started as a user starts it, in processes of its own. One run that is not counted brings
files into the page cache. Memory is the proportional share (Pss) of the whole tree of processes
when the first token is there; beyond packed weights stand Python, buffers, and the KV blocks that
this one prompt fills. Timings of a machine that does other work too are that work's.
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

from octavo.cli.flags import with_engine_flags
from octavo.cli.model import fetched
from octavo.errors import BackendUnavailable, WorkerFailed

PROMPT = "What is the capital of France?"

Prompt = Annotated[str, typer.Option(help="What is asked.")]
Rounds = Annotated[int, typer.Option(help="Starts of each command.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the start of the process to the first token, and the memory of its tree then."""

    first_token_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Startup:
    """Medians over the rounds."""

    command: str
    first_token_s: float
    fastest_s: float
    slowest_s: float
    memory_bytes: int
    beyond_weights_bytes: int

    @staticmethod
    def of(command: str, starts: Sequence[Start], weight_bytes: int) -> Startup:
        times, memory = (
            [one.first_token_s for one in starts],
            int(statistics.median(one.memory_bytes for one in starts)),
        )
        return Startup(
            command, statistics.median(times), min(times), max(times), memory, memory - weight_bytes
        )


@with_engine_flags(without=("seed",))
def startup(
    *, prompt: Prompt = PROMPT, rounds: Rounds = 5, json: Json = False, options: dict[str, Any]
) -> None:
    """Time from the start of `octavo run` and `octavo serve` to the first token, and memory beyond
    the weights.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        raise BackendUnavailable(
            "bench startup: this system has no /proc/PID/smaps_rollup",
            hint="memory is measured on Linux",
        )
    options = fetched(options)
    weight_bytes = _weight_bytes(options)
    _run(options, prompt)
    runs = [_run(options, prompt) for _ in range(rounds)]
    serves = [_serve(options, prompt) for _ in range(rounds)]
    found = [Startup.of("run", runs, weight_bytes), Startup.of("serve", serves, weight_bytes)]
    if json:
        import json as json_format

        result = {
            "model": options["served_model_name"],
            "rounds": rounds,
            "weight_bytes": weight_bytes,
        }
        print(json_format.dumps(result | {one.command: asdict(one) for one in found}))
        return
    mebibyte = 1 << 20
    print(
        f"{options['served_model_name']}: packed weights {weight_bytes / mebibyte:.0f} MiB,"
        f" {rounds} starts of each command"
    )
    for one in found:
        times = (
            f"first token after {one.first_token_s:.2f} s ({one.fastest_s:.2f} to"
            f" {one.slowest_s:.2f})"
        )
        print(
            f"octavo {one.command:6} {times}, memory {one.memory_bytes / mebibyte:.0f} MiB", end=""
        )
        print(f", {one.beyond_weights_bytes / mebibyte:.0f} beyond the weights")


def _weight_bytes(options: dict[str, Any]) -> int:
    """From the model's header."""
    from octavo.config.engine_config import EngineConfig
    from octavo.wiring.plan import plan_model
    from octavo.worker.machine import Machine

    found = plan_model(
        EngineConfig.from_options(**options), memory_bytes=Machine().available_bytes() or 0
    )
    return found.capacity.weight_bytes


def _run(options: dict[str, Any], prompt: str) -> Start:
    """The process is stopped where its first text comes, so that its memory is that of this moment,
    and goes no further.
    """
    from octavo.cli.own_server import environment, octavo_command, shell_flags

    flags = [flag for name, value in options.items() for flag in shell_flags(name, value)]
    started = time.perf_counter()
    with subprocess.Popen(
        octavo_command("run", *flags, "--", prompt),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        bufsize=0,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(1)
        first_token_s = time.perf_counter() - started
        if not first:
            said = process.communicate()[1].decode(errors="replace").strip()
            raise WorkerFailed(f"octavo run ended with exit code {process.returncode}: {said}")
        process.send_signal(signal.SIGSTOP)
        memory_bytes = tree_bytes(process.pid)
        process.kill()
    return Start(first_token_s, memory_bytes)


def _serve(options: dict[str, Any], prompt: str) -> Start:
    """One request is sent as soon as the server says that it serves."""
    import asyncio

    import msgspec

    from octavo.cli.own_server import own_server
    from octavo.cli.stream_client import StreamClient

    body = {
        "model": options["served_model_name"],
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started = time.perf_counter()
    with own_server(options) as url:
        streamed = asyncio.run(
            StreamClient(url, None).complete(msgspec.json.encode(body | {"return_token_ids": True}))
        )
        return Start(
            streamed.token_times[0] - started, sum(map(tree_bytes, _children(os.getpid())))
        )


def tree_bytes(pid: int) -> int:
    """Memory of a process and of all that it has started: what they share is counted once."""
    return _own_bytes(pid) + sum(map(tree_bytes, _children(pid)))


def _own_bytes(pid: int) -> int:
    """0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, task.read_text().split())
