"""Tokens/s and memory against the length of the context, and tokens/s against how many requests run
at once, for types of KV cache.

    python benchmarks/context_curve.py --model smollm2 --rounds 5

Contexts: one request alone, a prompt of as many random tokens, then --output more; prefill and
decode by the request's own timings, memory as the system counts it when it has ended. A context
that is more than the model takes is left out. Concurrency: that many requests of --prompt and
--output tokens at once, prompt and new tokens/s. Each type of cache runs in a process of its own,
in turns: round 1 of each, then round 2 of each. Lines of JSON go to benchmarks/results/ too: each
measurement, then medians, least and greatest. Nothing else should run on the machine.
"""

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from octavo import LLM, SamplingParams

RESULTS = Path(__file__).parent / "results"
CONTEXTS, CONCURRENCY = (128, 1024, 8192, 32768), (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIGURES = (
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "tokens_per_second",
    "resident_bytes",
)


def draw(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    source = random.Random(seed)
    return [
        {"prompt_token_ids": [source.randint(10, 40000) for _ in range(length)]}
        for _ in range(count)
    ]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def params(output: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)


def over_contexts(llm: LLM, contexts: list[int], output: int) -> Iterator[dict[str, Any]]:
    for context in contexts:
        if context + output > llm.info.max_model_len:
            continue
        (done,) = llm.generate(draw(1, context, 1), params(output))
        assert done.timings is not None, done.error
        yield {
            "context": context,
            "prefill_tokens_per_second": round(context / done.timings.prefill_s, 1),
            "decode_tokens_per_second": round((output - 1) / done.timings.decode_s, 1),
            "resident_bytes": resident_bytes(),
        }


def over_concurrency(
    llm: LLM, counts: list[int], prompt: int, output: int
) -> Iterator[dict[str, Any]]:
    for count in counts:
        began = time.perf_counter()
        llm.generate(draw(count, prompt, 2), params(output))
        took = time.perf_counter() - began
        yield {
            "concurrency": count,
            "tokens_per_second": round(count * (prompt + output) / took, 1),
            "resident_bytes": resident_bytes(),
        }


def measure(args: argparse.Namespace, kv: str) -> None:
    """Measures one round of one type of cache; prints its lines on stdout."""
    options: dict[str, Any] = {
        "quantization": args.quantization,
        "kv_cache_dtype": kv,
        "enable_prefix_caching": False,
    }
    options |= {} if args.max_model_len is None else {"max_model_len": args.max_model_len}
    with LLM(
        args.model, max_num_seqs=max([1, *args.concurrency]), report=lambda text: None, **options
    ) as llm:
        llm.generate(draw(2, 64, 0), params(8))
        curves = (
            over_contexts(llm, args.contexts, args.output),
            over_concurrency(llm, args.concurrency, args.prompt, args.output),
        )
        for row in itertools.chain(*curves):
            print(json.dumps({"kv": kv, **row}), flush=True)


def run_round(kv: str) -> Iterator[dict[str, Any]]:
    """Returns the lines of `measure`, which runs in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", kv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield from map(json.loads, child.stdout)
    if child.returncode:
        raise SystemExit(f"the process for {kv} ended with {child.returncode}")


def compare(args: argparse.Namespace, out: TextIO) -> None:
    def say(row: dict[str, Any]) -> None:
        for stream in (sys.stdout, out):
            print(json.dumps(row), file=stream, flush=True)

    say(
        {
            "machine": _machine(),
            "load": os.getloadavg(),
            "model": args.model,
            "prompt": args.prompt,
            "output": args.output,
        }
    )
    seen: dict[tuple[str, str, int, str], list[float]] = defaultdict(list)
    for number in range(args.rounds):
        for kv in args.kv_cache_dtype:
            for row in run_round(kv):
                axis = "context" if "context" in row else "concurrency"
                for figure in FIGURES:
                    if figure in row:
                        seen[kv, axis, row[axis], figure].append(row[figure])
                say({"round": number, **row, "at": time.strftime("%H:%M:%S")})
    for (kv, axis, at, figure), values in sorted(seen.items()):
        say(
            {
                "kv": kv,
                axis: at,
                "figure": figure,
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
            }
        )


def _machine() -> str:
    """Returns processor and cores, as the kernel names them."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [
        line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["bf16", "int8"])
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    parser.add_argument("--concurrency", type=int, nargs="*", default=CONCURRENCY)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        return measure(args, args.only)
    name = f"{time.strftime('%Y-%m-%d')}-context-{Path(args.model).stem}.jsonl"
    with (RESULTS / name).open("w") as out:
        compare(args, out)


if __name__ == "__main__":
    main()
