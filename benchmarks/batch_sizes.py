"""Milliseconds of a decode step by the number of requests in it.

    python benchmarks/batch_sizes.py [--sizes 31 32 33 48] [--rounds 3] [--tokens 24]

Sizes take turns within each round. Prints one JSON line for each size: the median of a step, and
its microseconds a request. A step with one request more should cost about one request more: where
the line jumps, threads share the rows unevenly (`choose_row_block` in csrc/runtime/step_run.h).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from octavo import LLM, SamplingParams

SIZES = (1, 8, 16, 24, 31, 32, 33, 36, 40, 44, 47, 48, 49, 56, 64, 65, 80, 96)


def step_s(llm: LLM, num_requests: int, num_steps: int) -> float:
    """Returns the seconds of one decode step of some requests."""
    params = SamplingParams(temperature=0, max_tokens=num_steps, ignore_eos=True)
    prompts = [[100 + request] for request in range(num_requests)]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return (time.perf_counter() - began) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    llm = LLM(
        given.model, max_model_len=512, max_num_seqs=max(given.sizes), report=lambda text: None
    )
    step_s(llm, max(given.sizes), given.tokens)
    times: dict[int, list[float]] = {size: [] for size in given.sizes}
    for _ in range(given.rounds):
        for size, found in times.items():
            found.append(step_s(llm, size, given.tokens))
    for size, found in times.items():
        median_s = statistics.median(found)
        line = {
            "requests": size,
            "step_ms": round(1e3 * median_s, 3),
            "us_a_request": round(1e6 * median_s / size, 1),
        }
        print(json.dumps(line), flush=True)
    llm.close()


if __name__ == "__main__":
    main()
