"""Octavo beside other engines on the standard work (engines/work.py), in turns, each in its own
process and environment.

    python benchmarks/compare.py --rounds 5 \\
        --engine 'octavo|as packed|smollm2|{}' \\
        --engine 'octavo|int8|smollm2|{"quantization": "int8"}' \\
        --engine 'transformers|bf16|DIR|bfloat16|/path/of/python' \\
        --engine 'vllm|bf16|DIR|{"dtype": "bfloat16"}|/path/of/python'

An engine is NAME|FORMAT|MODEL|OPTIONS[|PYTHON]; its script is engines/NAME_engine.py. Prints a JSON
line per result and, last, for each work and engine the median, least and greatest of the rounds,
with the machine. Nothing else should run on the machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ENGINES = Path(__file__).parent / "engines"
WORKS = ("single", "batch", "prefill")


@dataclass(frozen=True)
class Engine:
    name: str
    format: str
    model: str
    options: str
    python: str

    @staticmethod
    def parse(text: str) -> "Engine":
        parts = text.split("|")
        if not 4 <= len(parts) <= 5:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected NAME|FORMAT|MODEL|OPTIONS[|PYTHON]"
            )
        name, form, model, options = parts[:4]
        return Engine(name, form, model, options, parts[4] if len(parts) == 5 else sys.executable)

    def run(
        self, requests: int, prompt: int, output: int, works: tuple[str, ...] = WORKS
    ) -> list[dict[str, object]]:
        command = [
            self.python,
            str(ENGINES / f"{self.name}_engine.py"),
            self.model,
            str(requests),
            str(prompt),
            str(output),
            self.options,
            ",".join(works),
        ]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=1800,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        results = [
            json.loads(line.removeprefix("RESULT "))
            for line in done.stdout.splitlines()
            if line.startswith("RESULT ")
        ]
        if done.returncode or len(results) != len(works):
            raise SystemExit(f"{self.name} ({self.format}) failed:\n{done.stderr[-2000:]}")
        return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=Engine.parse, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    args = parser.parse_args()
    print(
        json.dumps(
            {
                "machine": machine(),
                "load": os.getloadavg(),
                "requests": args.requests,
                "prompt": args.prompt,
                "output": args.output,
            }
        )
    )
    seen: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for round_number in range(args.rounds):
        for engine in args.engine:
            for result in engine.run(args.requests, args.prompt, args.output):
                seen[result["work"], engine.name, engine.format].append(result["tokens_per_second"])
                row = {
                    "round": round_number,
                    "engine": engine.name,
                    "format": engine.format,
                    **result,
                    "at": time.strftime("%H:%M:%S"),
                }
                print(json.dumps(row), flush=True)
    for (work, name, form), rates in sorted(seen.items()):
        summary = {
            "work": work,
            "engine": name,
            "format": form,
            "median": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
        }
        print(json.dumps(summary))


def machine() -> str:
    """Returns processor and cores, as the kernel names them."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [
        line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    main()
