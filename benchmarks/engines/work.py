"""The standard work that every engine is timed on: the same seeded token ids, greedy,
end-of-sequence ignored.

single: one request; batch: all at once; prefill: all at once, one output token each. An engine's
script gives `measure` a function that runs a batch of token-id prompts to exactly `num_output`
tokens each and returns how many tokens came out. The standard library alone is needed, for each
engine has a virtual environment of its own.
"""

import json
import random
import sys
import time
from collections.abc import Callable

WARM_TOKENS = 128
"""Tokens of a prompt in the warm-up, at most."""

Run = Callable[[list[list[int]], int], int]


def arguments() -> tuple[str, int, int, int, str]:
    """Returns (model, requests, prompt tokens, output tokens, options as text) from the command
    line.
    """
    model, requests, prompt, output, options = sys.argv[1:6]
    return model, int(requests), int(prompt), int(output), options


def measure(run: Run, requests: int, prompt: int, output: int) -> None:
    """Prints one line `RESULT {"work": ..., "tokens_per_second": ...}` a work, after a warm-up on
    other ids.
    """
    draw = random.Random(0)
    prompts = [[draw.randint(10, 40000) for _ in range(prompt)] for _ in range(requests)]
    warm = [[draw.randint(10, 40000) for _ in range(min(prompt, WARM_TOKENS))] for _ in range(2)]
    run(warm, 8)
    took = _timed(run, prompts[:1], output)
    report("single", output / took)
    took = _timed(run, prompts, output)
    report("batch", requests * (prompt + output) / took)
    took = _timed(run, prompts, 1)
    report("prefill", requests * prompt / took)


def _timed(run: Run, prompts: list[list[int]], num_output: int) -> float:
    began = time.perf_counter()
    made = run(prompts, num_output)
    took = time.perf_counter() - began
    if made != len(prompts) * num_output:
        raise SystemExit(f"{made} tokens came out, {len(prompts) * num_output} were asked for")
    return took


def report(work: str, rate: float) -> None:
    print(
        "RESULT " + json.dumps({"work": work, "tokens_per_second": float(f"{rate:.4g}")}),
        flush=True,
    )
