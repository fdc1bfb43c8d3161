"""The host's share of a decode step: an engine whose device computes nothing.

    python benchmarks/host_step.py [--streams 256] [--tokens 64] [--context 600] [--profile N]

Instructions are replaced by one that returns the same logits at once, in captured steps as in
others. A step then takes what the scheduler, the worker, the preparation of inputs, the search for
shared prefixes and sampling of a small vocabulary take on the host. Prints one JSON object: mean
and median milliseconds and Python calls of a decode step, and the garbage collector's pauses, which
are part of the mean. `--profile N` also prints the N functions that take most.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

# Attention of Triton prepares the inputs that it reads on a GPU; none of its kernels runs.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from benchmarks.on_gpu.offline import collections  # noqa: E402
from benchmarks.on_gpu.shapes import TINY, model_of  # noqa: E402
from benchmarks.on_gpu.watch import program_of  # noqa: E402
from octavo import LLM, SamplingParams  # noqa: E402
from octavo.executor.base import Computing  # noqa: E402
from octavo.executor.batch import StepBatch  # noqa: E402
from octavo.executor.kv import BLOCK_SIZE  # noqa: E402
from octavo.executor.torch.graphs import shapes_up_to  # noqa: E402
from octavo.executor.torch.instructions import Instructions  # noqa: E402
from octavo.executor.torch.kv_cache import TorchKvCache  # noqa: E402
from octavo.executor.torch.program import TorchProgram  # noqa: E402

SKIPPED = 4
"""Decode steps that still see the effects of the prompts."""

COUNTED = 8
"""Decode steps whose calls are counted."""


@dataclass(frozen=True)
class NoWork:
    """A graph that computes nothing."""

    logits: Tensor

    def replay(self) -> Tensor:
        return self.logits


@dataclass
class NullDevice:
    """Takes the place of the work of a Program from its first step on, and notes when steps of
    `streams` rows are launched.
    """

    program: TorchProgram
    streams: int
    width: int
    """Blocks of the captured steps' tables."""
    launched_at: list[float] = field(default_factory=list)
    on_step: Callable[[int], None] = lambda num_steps: None
    """Called before each step of `streams` rows with the number of those before."""
    _kv: Any = None

    def __post_init__(self) -> None:
        last = self.program.instructions.head[-1]
        zeros = torch.zeros(self.streams, last.op.outputs[0].width)
        none = replace(
            last, formula=lambda _, step: (zeros[: len(step.inputs["sample_rows"])],), dead=()
        )
        self.program.instructions = Instructions([], [none])
        self._launch: Callable[[StepBatch, Any], Computing] = self.program.launch
        self.program.launch = self.launch  # type: ignore[method-assign, assignment]

    def launch(self, batch: StepBatch, kv: TorchKvCache) -> Computing:
        if self._kv is None:
            self._kv = kv
            shapes = shapes_up_to(self.streams)
            self.program.capture(kv, shapes, self.width, lambda run: NoWork(run().clone()))
        if len(batch.token_ids) == self.streams == len(batch.sample_rows):
            self.on_step(len(self.launched_at))
            self.launched_at.append(time.perf_counter())
        return self._launch(batch, kv)


@dataclass
class Calls:
    """Counts calls of Python functions in this thread during `COUNTED` steps."""

    count: int = 0

    def __call__(self, num_steps: int) -> None:
        if num_steps == SKIPPED:
            sys.setprofile(self._note)
        elif num_steps == SKIPPED + COUNTED:
            sys.setprofile(None)

    def _note(self, _: Any, event: str, __: Any) -> None:
        self.count += event == "call"


def measure(
    streams: int, tokens: int, context: int, profile: cProfile.Profile | None = None
) -> dict[str, Any]:
    """Returns the milliseconds and Python calls of a decode step of `streams` requests."""
    most = context + max(tokens, SKIPPED + COUNTED + 2)
    with model_of(TINY) as path, engine(path, streams, most) as llm:
        device = NullDevice(program_of(llm), streams, -(-most // BLOCK_SIZE))
        generate(llm, streams, SKIPPED + 2, context)
        device.launched_at.clear()
        with collections() as pauses:
            generate(llm, streams, tokens, context)
        taken = [1e3 * (b - a) for a, b in pairwise(device.launched_at)][SKIPPED:]
        device.launched_at.clear()
        device.on_step = calls = Calls()
        generate(llm, streams, SKIPPED + COUNTED + 2, context)
        if profile is not None:
            device.launched_at.clear()
            device.on_step = lambda num: profile.enable() if num == SKIPPED else None
            generate(llm, streams, tokens, context)
            profile.disable()
    return {
        "streams": streams,
        "context": context,
        "steps": len(taken),
        "mean_ms": round(statistics.mean(taken), 3),
        "median_ms": round(statistics.median(taken), 3),
        "calls": round(calls.count / COUNTED),
        "collections": len(pauses),
        "collections_ms": round(1e3 * sum(pauses), 3),
        "longest_collection_ms": round(1e3 * max(pauses, default=0.0), 3),
    }


def engine(path: Path, streams: int, max_model_len: int) -> LLM:
    return LLM(
        model=str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        backend="torch",
        device="cpu",
        attention_backend="triton",
        threads=1,
        max_model_len=max_model_len,
        max_num_seqs=streams,
        max_num_batched_tokens=max(2048, streams),
        kv_cache_memory_bytes=f"{1 << 30}",
        enable_prefix_caching=True,
        async_scheduling="on",
    )


def generate(llm: LLM, streams: int, tokens: int, context: int) -> None:
    """Generates `tokens` tokens for prompts of the same beginning."""
    shared = [10 + at % 200 for at in range(context // 2)]
    prompts = [
        {"prompt_token_ids": [*shared, *(stream % 200 for _ in range(context - len(shared)))]}
        for stream in range(streams)
    ]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--profile", type=int, default=0)
    args = parser.parse_args(arguments)
    profile = cProfile.Profile() if args.profile else None
    print(json.dumps(measure(args.streams, args.tokens, args.context, profile)))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)


if __name__ == "__main__":
    main()
