"""A whole engine offline: where the time between steps goes, drafts, and one adapter.

`gaps` lists the ten longest times in which the device waited, the pauses of Python's garbage
collector and the kernels that were compiled at the same time.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu.engine import engine_options, generate, loads_of
from benchmarks.on_gpu.report import compared
from benchmarks.on_gpu.settings import ROOT, Emit, Settings, attempt
from benchmarks.on_gpu.shapes import model_of, shape_of
from benchmarks.on_gpu.watch import Watch, program_of
from octavo import LLM
from octavo.executor.torch.compilations import COMPILATIONS

MOST_GAPS = 10
STREAMS = (1, 32)


def section(settings: Settings, emit: Emit) -> None:
    with model_of(shape_of(tiny=settings.tiny)) as path:
        attempt(emit, "gaps", partial(gaps, path, settings, emit))


def extras(settings: Settings, emit: Emit) -> None:
    """Measures drafts and an adapter, each beside the same requests without."""
    with model_of(shape_of(tiny=settings.tiny)) as path:
        attempt(emit, "drafts", partial(drafts, path, settings, emit))
        attempt(emit, "one adapter", partial(one_adapter, path, settings, emit))


@contextmanager
def collections() -> Iterator[list[float]]:
    """Collects the seconds of each pause of the garbage collector."""
    pauses: list[float] = []
    began = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - began)

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


def gaps(path: Path, settings: Settings, emit: Emit) -> None:
    count, prompt, output = loads_of(settings).offered
    with LLM(model=str(path), **engine_options(settings, loads_of(settings))) as llm:
        watch = Watch(program_of(llm), torch.device(settings.device))
        _seconds(llm, 2, prompt, 4)
        late = COMPILATIONS.num_late
        with collections() as pauses:
            taken: list[float] = []
            steps = watch.taken(lambda: taken.append(_seconds(llm, count, prompt, output)))
        waits = [
            (max(0.0, before.ended.until(after.began)), at)
            for at, (before, after) in enumerate(pairwise(steps))
        ]
        longest = sorted(waits, reverse=True)[:MOST_GAPS]
        emit(
            {
                "gaps": f"{count} of {prompt} + {output}",
                "seconds": round(taken[0], 3),
                "steps": len(steps),
                "idle_s": round(sum(wait for wait, _ in waits), 4),
                "longest_ms": [[at, round(1e3 * wait, 3)] for wait, at in longest],
                "collections": len(pauses),
                "longest_collection_ms": round(1e3 * max(pauses, default=0.0), 3),
                "compilations": COMPILATIONS.num_late - late,
            }
        )


def drafts(path: Path, settings: Settings, emit: Emit) -> None:
    """Measures streams that repeat themselves, which n-grams of their own text continue."""
    options = {"spec_method": "ngram", "async_scheduling": "auto"}
    _with_and_without(path, settings, emit, "drafts of n-grams", options, {})


def one_adapter(path: Path, settings: Settings, emit: Emit) -> None:
    # A script, which imports its neighbours by their own names.
    sys.path.append(str(ROOT / "benchmarks"))
    from benchmarks.adapters import save_adapters

    options = dict(engine_options(settings, loads_of(settings))) | {"model": str(path)}
    with tempfile.TemporaryDirectory() as folder:
        (adapter,) = save_adapters(options, Path(folder), 1, 16, ("q_proj", "v_proj"))
        _with_and_without(
            path,
            settings,
            emit,
            "one adapter",
            {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16},
            {"lora_request": adapter},
        )


def _with_and_without(
    path: Path,
    settings: Settings,
    emit: Emit,
    name: str,
    extra: dict[str, Any],
    request_options: dict[str, Any],
) -> None:
    """Compares tokens per second with an option and without, and counts late compilations."""
    usual = dict(engine_options(settings, loads_of(settings)))
    _, prompt, output = loads_of(settings).offered
    found: dict[str, list[float]] = {}
    for kind, options, wanted in (("without", usual, {}), ("with", usual | extra, request_options)):
        with LLM(model=str(path), **options) as llm:
            for streams in STREAMS[: 1 if settings.tiny else None]:
                _seconds(llm, streams, prompt, 4, **wanted)
                taken = _seconds(llm, streams, prompt, output, **wanted)
                found.setdefault(kind, []).append(streams * output / taken)
    for streams, mine, theirs in zip(STREAMS, found["with"], found["without"], strict=False):
        emit(compared(f"tokens/s, {name} against none", f"{streams} streams", mine, theirs))
    emit({"compilations": COMPILATIONS.num_late, "what": name})


def _seconds(llm: LLM, streams: int, prompt: int, output: int, **more: Any) -> float:
    """Returns the seconds that some requests take together; each repeats a few tokens."""
    prompts = [
        {"prompt_token_ids": [10 + (at + stream) % 7 for at in range(prompt)]}
        for stream in range(streams)
    ]
    began = time.perf_counter()
    generate(llm, prompts, output, **more)
    return time.perf_counter() - began
