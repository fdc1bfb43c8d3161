"""What two ranks of one thread cost beside one process with two threads: one stream's tokens/s.

    python benchmarks/ranks.py [--model smollm2] [--rounds 7] [--tokens 128]

Both engines are loaded at once and take turns; the goal is 0.85. On a machine with two cores this
is the price of the split, not a gain. Prints a JSON line with the medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

from compare import machine

from octavo import LLM, SamplingParams

GOAL = 0.85


def engine(model: str, **options: Any) -> LLM:
    return LLM(
        model,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes="64MiB",
        max_model_len=512,
        report=lambda text: None,
        **options,
    )


def tokens_per_s(llm: LLM, num_tokens: int) -> float:
    """Measures the tokens after the first one of a single request."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompt = [(7 * i) % 250 + 3 for i in range(32)]
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([prompt], first)
    middle = time.perf_counter()
    llm.generate([prompt], params)
    seconds = time.perf_counter() - middle - (middle - began)
    return (num_tokens - 1) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    ways = {
        "one process, two threads": {"threads": 2, "num_scheduler_steps": 1},
        "two ranks, one thread each": {"threads": 1, "tensor_parallel_size": 2},
    }
    engines = {name: engine(args.model, **options) for name, options in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    load = os.getloadavg()
    for llm in engines.values():
        tokens_per_s(llm, args.tokens)
    for turn in range(args.rounds):
        order = list(engines) if turn % 2 == 0 else list(engines)[::-1]
        for name in order:
            found[name].append(tokens_per_s(engines[name], args.tokens))
    one, two = found.values()
    ratios = [b / a for a, b in zip(one, two, strict=True)]
    print(
        json.dumps(
            {
                "machine": machine(),
                "load": load,
                "model": args.model,
                **{name: round(statistics.median(values), 1) for name, values in found.items()},
                "ratio": round(statistics.median(ratios), 3),
                "range": [round(min(ratios), 3), round(max(ratios), 3)],
                "goal": GOAL,
            }
        )
    )
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
