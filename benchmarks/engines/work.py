"""The standard work that every engine is timed on: the same seeded token ids, greedy,
end-of-sequence ignored.

single: one request; batch: all at once; prefill: all at once, one output token each; decode: the
tokens of `single` after its first one. An engine's script gives `measure` a function that runs a
batch of token-id prompts to exactly `num_output` tokens each and returns how many tokens came out.
The standard library alone is needed, for each engine has a virtual environment of its own.
"""

import json
import random
import sys
import time
from collections.abc import Callable

WARM_TOKENS = 128
"""Tokens of a prompt in the warm-up, at most."""

WORKS = ("single", "batch", "prefill")
"""What is measured if the command line does not name it."""

Run = Callable[[list[list[int]], int], int]


def works() -> tuple[str, ...]:
    """Returns the works to measure: the sixth argument, separated by commas, or all of `WORKS`."""
    return tuple(sys.argv[6].split(",")) if len(sys.argv) > 6 else WORKS


def arguments() -> tuple[str, int, int, int, str]:
    """Returns (model, requests, prompt tokens, output tokens, options as text) from the command
    line.
    """
    model, requests, prompt, output, options = sys.argv[1:6]
    return model, int(requests), int(prompt), int(output), options


def measure(
    run: Run,
    requests: int,
    prompt: int,
    output: int,
    decode_seconds: Callable[[], float] | None = None,
) -> None:
    """Prints one line `RESULT {"work": ..., "tokens_per_second": ...}` a work, after a warm-up on
    other ids.

    Args:
        decode_seconds: seconds from the first token of the last run, of one request, to its last
            token. Needed for `decode`.
    """
    draw = random.Random(0)
    prompts = [[draw.randint(10, 40000) for _ in range(prompt)] for _ in range(requests)]
    warm = [[draw.randint(10, 40000) for _ in range(min(prompt, WARM_TOKENS))] for _ in range(2)]
    run(warm, 8)
    for work in works():
        if work == "single":
            report(work, output / _timed(run, prompts[:1], output))
        elif work == "batch":
            report(work, requests * (prompt + output) / _timed(run, prompts, output))
        elif work == "prefill":
            report(work, requests * prompt / _timed(run, prompts, 1))
        elif work == "decode" and decode_seconds:
            _timed(run, prompts[:1], output)
            report(work, (output - 1) / decode_seconds())
        else:
            raise SystemExit(f"this engine does not measure {work!r}")


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
