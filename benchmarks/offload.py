"""Octavo with streamed weights beside llama.cpp's mmap under the same limit of memory, in turns.

    python benchmarks/dense_1_6b.py dense-1.6b.gguf
    python benchmarks/offload.py dense-1.6b.gguf --weights-dir /data/weights \\
        --memory 227MiB --memory 453MiB --cgroup /sys/fs/cgroup/memory \\
        --llamacpp PATH/llama-batched-bench

Both get `--memory` and what Octavo asks for besides (`octavo plan`); the limit counts the cache of
files too. The bound of a stream is the rate at which the disk gives the same file in Octavo's
blocks, measured beside each run, divided by the bytes that a step reads; `--schedule experts` reads
what routers choose (`moe_2b.py --skew` makes a model whose routers prefer some experts), and has no
such bound. Prints a JSON line per result. Needs the right to make groups below `--cgroup`, and a
machine that does nothing else.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from memory_group import Ended, MemoryGroup

from octavo.config.engine_config import EngineConfig
from octavo.config.sizes import parse_bytes
from octavo.executor.native.disk import measure_file
from octavo.wiring.plan import ModelPlan, plan_model

ENGINES = Path(__file__).parent / "engines"
TIMEOUT_S = 3600.0
DISK_S = 2.0
"""Length of each measurement of the disk, in seconds."""
BEGUN_BYTES = 64 << 20
"""Bytes that Octavo has taken when it compares its plan with what is free."""
BLOCK = 16
"""Tokens of a KV block."""


@dataclass(frozen=True)
class Round:
    """The work of a round, and where it runs."""

    model: Path
    directory: Path
    cgroup: Path
    requests: int
    prompt: int
    output: int
    packed: set[str] = field(default_factory=set)
    """Schedules whose file has been written."""

    def options(self, memory: int, schedule: str) -> dict[str, object]:
        return {
            "weights_memory_bytes": memory,
            "weights_dir": str(self.directory),
            "weights_schedule": schedule,
            "skip_tokenizer_init": True,
            "max_model_len": self.prompt + self.output + BLOCK,
            "max_num_seqs": self.requests,
            "max_num_batched_tokens": max(128, self.requests * self.prompt),
        }

    def plan(self, options: dict[str, object]) -> ModelPlan:
        config = EngineConfig.from_options(**options, model=str(self.model))
        return plan_model(config, memory_bytes=1 << 40)

    def run(
        self,
        engine: str,
        options: dict[str, object],
        limit: int | None,
        python: str = sys.executable,
    ) -> Ended:
        command = [
            python,
            str(ENGINES / f"{engine}_engine.py"),
            *(str(each) for each in (self.model, self.requests, self.prompt, self.output)),
            json.dumps(options),
        ]
        forget(self.model)
        with MemoryGroup(self.cgroup, limit) as group:
            return group.run(command, TIMEOUT_S)

    def limit(self, memory: int, schedule: str) -> int:
        """Returns what Octavo asks for with KV of all requests; packs the file before that."""
        options = self.options(memory, schedule)
        before = set(self.directory.glob("*.weights"))
        if schedule not in self.packed:
            self.packed.add(schedule)
            ended = self.run("octavo", options, None)
            if not self.rates(ended):
                raise SystemExit(f"octavo failed:\n{ended.stderr[-2000:]}")
            written = set(self.directory.glob("*.weights")) - before
            print(json.dumps({"schedule": schedule, "files": len(written)}), flush=True)
        capacity = self.plan(options).capacity
        tokens = self.requests * (self.prompt + self.output + 2 * BLOCK)
        return capacity.fixed_bytes + int(tokens * capacity.kv_token_bytes) + BEGUN_BYTES

    def disk_rate(self) -> float:
        """Measures the rate at which the disk gives the file of weights."""
        path = next(self.directory.glob("*.weights"))
        rates = measure_file(path, seconds=DISK_S)
        if rates is None:
            raise SystemExit(f"{self.directory}: its file system has no direct reads")
        return rates.in_order

    def rates(self, ended: Ended) -> dict[str, float]:
        """Returns new tokens a second, of one request and of all; of an engine that failed none."""
        rates = {}
        for line in ended.stdout.splitlines():
            if line.startswith("RESULT "):
                found = json.loads(line.removeprefix("RESULT "))
                rates[found["work"]] = found["tokens_per_second"]
        if not {"single", "batch"} <= set(rates):
            return {}
        share = self.output / (self.prompt + self.output)
        return {"1": rates["single"], str(self.requests): rates["batch"] * share}


def run_llama(work: Round, llama: Path, limit: int, *, mmap: bool) -> Ended:
    """Runs llama.cpp: its llama-batched-bench, or the Python that has the package xllamacpp."""
    if llama.name.startswith("python"):
        options: dict[str, object] = {"mmap": mmap, "repack": False}
        return work.run("xllamacpp", options, limit, str(llama))
    # Weights in another layout are copies, which mmap shares with no file.
    arguments = ["--no-repack", "--load-mode", "mmap" if mmap else "none"]
    return work.run("llamacpp", {"binary": str(llama), "arguments": arguments}, limit)


def results(
    work: Round, memory: int, schedules: list[str], llama: Path | None
) -> Iterator[dict[str, object]]:
    """Yields what one round finds for one allowance of memory."""
    for schedule in schedules:
        limit = work.limit(memory, schedule)
        options = work.options(memory, schedule)
        streamed, rate = work.plan(options).footprint.streamed_bytes, work.disk_rate()
        bound = rate / streamed if streamed else None  # experts: what is read depends on routing
        ended = work.run("octavo", options, limit)
        rates = work.rates(ended)
        yield {
            **line_of("octavo", memory, limit, ended, rates),
            "schedule": schedule,
            "disk_bytes_per_s": round(rate),
            "streamed_bytes": streamed,
            "of_bound": {}
            if bound is None
            else {
                streams: round(found / bound / int(streams), 3) for streams, found in rates.items()
            },
        }
    for mmap in (True, False) if llama is not None else ():
        ended = run_llama(work, llama, limit, mmap=mmap)
        name = "llama.cpp, mmap" if mmap else "llama.cpp, read"
        yield line_of(name, memory, limit, ended, work.rates(ended))


def forget(file: Path) -> None:
    """Drops a file from the system's cache, where its pages would count for no group."""
    number = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(number)


def line_of(
    engine: str, memory: int, limit: int, ended: Ended, rates: dict[str, float]
) -> dict[str, object]:
    return {
        "engine": engine,
        "memory": memory,
        "limit": limit,
        "tokens_per_second": rates or f"failed: {ended.stderr.strip()[-200:]}",
        "peak_bytes": ended.peak_bytes,
        "bytes_read": ended.bytes_read,
        "at": time.strftime("%H:%M:%S"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--weights-dir", type=Path, required=True)
    parser.add_argument("--memory", action="append", required=True)
    parser.add_argument("--cgroup", type=Path, required=True)
    parser.add_argument("--schedule", action="append", choices=("pinned", "layers", "experts"))
    parser.add_argument(
        "--llamacpp", type=Path, help="llama-batched-bench, or a Python that has xllamacpp"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--output", type=int, default=16)
    args = parser.parse_args()
    work = Round(args.model, args.weights_dir, args.cgroup, args.requests, args.prompt, args.output)
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()}), flush=True)
    for number in range(args.rounds):
        for memory in args.memory:
            allowed = parse_bytes(memory, name="--memory")
            for found in results(work, allowed, args.schedule or ["pinned"], args.llamacpp):
                print(
                    json.dumps({"round": number, "load": os.getloadavg()[0], **found}), flush=True
                )


if __name__ == "__main__":
    main()
