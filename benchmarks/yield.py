"""Speed of one stream on one core, with and without a busy neighbour of equal priority on that
core: waiting threads must yield.

    python benchmarks/yield.py [--model smollm2] [--threads N] [--cpu 1] [--rounds 5] [--tokens 96]

Quiet and busy rounds take turns. Prints one JSON line: tokens/s of each round, the medians, and
their ratio. A fair share of the core would be 0.5 on one thread; a barrier that only spins was seen
to fall to 0.05.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time

from octavo import LLM, SamplingParams


def burn() -> None:
    while True:
        pass


def tokens_per_s(llm: LLM, tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate("The history of the printing press begins", params)
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.cpu})
    speeds: dict[str, list[float]] = {"quiet": [], "busy": []}
    with LLM(
        args.model,
        threads=args.threads,
        max_model_len=1024,
        kv_cache_memory_bytes="128MiB",
        report=lambda text: None,
    ) as llm:
        tokens_per_s(llm, 8)
        for _ in range(args.rounds):
            speeds["quiet"].append(tokens_per_s(llm, args.tokens))
            neighbour = multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
            neighbour.start()
            time.sleep(1.0)  # its start is over, it has the core for itself
            speeds["busy"].append(tokens_per_s(llm, args.tokens))
            neighbour.kill()
            neighbour.join()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = medians["busy"] / medians["quiet"]
    print(
        json.dumps(
            {
                "threads": args.threads,
                "cpu": args.cpu,
                "speeds": speeds,
                "medians": medians,
                "ratio": round(ratio, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
