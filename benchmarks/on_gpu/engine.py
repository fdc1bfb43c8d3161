"""A whole engine over a dense model of random weights: one stream, many streams, prompts; in bf16
and in 4 bits.

Times come from the device's own marks between steps (`watch.py`). A decode step's bound is the
bytes of all weights that it reads, and of K and V of all contexts, at the bandwidth of a large
copy. A prompt's bound is its operations at the rate of a large product.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks.on_gpu.report import bound_of, shared, timed
from benchmarks.on_gpu.settings import Emit, Settings, attempt
from benchmarks.on_gpu.shapes import Shape, model_of, shape_of
from benchmarks.on_gpu.watch import Look, Steady, Watch, program_of
from octavo import LLM, SamplingParams
from octavo.executor.torch.program import TorchProgram
from octavo.program.ops import Embedding

Quantization = Literal["int4"] | None


@dataclass(frozen=True)
class Loads:
    """The work of each measurement."""

    streams: int
    """Number of streams of the measurement of many."""
    context: int
    """Tokens of each context halfway through the `decoded` steps."""
    decoded: int
    """Number of decode steps."""
    prompt: int
    """Tokens of the prompt of the prefill measurement."""
    offered: tuple[int, int, int]
    """Requests that other engines get too: how many, tokens of a prompt, tokens of an output."""


LOOKED_INTO = 18
"""Number of steps behind the measured ones, some of which are profiled to show what takes the time.
"""

FULL = Loads(256, 1024, 64, 8192, (128, 512, 64))
TINY = Loads(4, 40, 16, 64, (4, 20, 6))


def loads_of(settings: Settings) -> Loads:
    return TINY if settings.tiny else FULL


def plain(settings: Settings, emit: Emit) -> None:
    _section(settings, emit, None, "bf16")


def four_bits(settings: Settings, emit: Emit) -> None:
    """Measures an engine whose Values and half of the matrices behind a gate have 8 bits, as
    `--quantization int4` packs them.
    """
    _section(settings, emit, "int4", "4-bit")


def _section(settings: Settings, emit: Emit, quantization: Quantization, name: str) -> None:
    shape, loads = shape_of(tiny=settings.tiny), loads_of(settings)
    with model_of(shape) as path:
        began = time.perf_counter()
        llm = LLM(model=str(path), quantization=quantization, **engine_options(settings, loads))
        emit(
            {
                "engine": name,
                "ready_s": round(time.perf_counter() - began, 1),
                "options": dict(settings.options),
                "kv": llm.info.description,
            }
        )
        with llm:
            measured = Measured(
                llm,
                shape,
                loads,
                settings,
                emit,
                name,
                Watch(program_of(llm), torch.device(settings.device)),
            )
            attempt(emit, f"decode, one stream, {name}", measured.one_stream)
            attempt(emit, f"decode, many streams, {name}", measured.many_streams)
            attempt(emit, f"prefill, {name}", measured.prompts)
            if quantization is None:
                attempt(emit, "offered requests", measured.offered)


def engine_options(settings: Settings, loads: Loads) -> Mapping[str, Any]:
    """Returns the engine's options, under which steps run ahead of results on a CPU too, as on
    CUDA.
    """
    usual = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "backend": "torch",
        "device": settings.device,
        "dtype": "bfloat16",
        "max_model_len": loads.prompt + 64,
        "max_num_seqs": loads.streams,
        "max_num_batched_tokens": max(2048, loads.prompt) if not settings.tiny else loads.prompt,
        "enable_prefix_caching": False,
        "swap_space": "64MiB",
        "async_scheduling": "on",
    }
    if settings.device == "cpu":
        usual |= {"threads": 1, "kv_cache_memory_bytes": "16MiB"}
    return usual | dict(settings.options)


@dataclass(frozen=True)
class Measured:
    llm: LLM
    shape: Shape
    loads: Loads
    settings: Settings
    emit: Emit
    name: str
    watch: Watch

    def one_stream(self) -> None:
        decoded = self.loads.decoded
        prompt, look = self._prompts(1, 16 if self.settings.tiny else 128), Look(1, decoded + 6)
        steady = Steady.of(
            self.watch.taken(lambda: self._generate(prompt, decoded + LOOKED_INTO), look),
            1,
            decoded,
        )
        self._decoded("decode, one stream", f"context {steady.keys:,.0f}", steady, look)

    def many_streams(self) -> None:
        """Measures decode steps of many streams. Their prompts take some steps, in which the first
        streams generate already; then all generate together.
        """
        loads = self.loads
        prompt = loads.context - loads.decoded // 2
        prompt_steps = (
            -(-loads.streams * prompt // self.llm.config.scheduler.max_num_batched_tokens) + 8
        )
        output = prompt_steps + loads.decoded + LOOKED_INTO
        prompts, look = self._prompts(loads.streams, prompt), Look(loads.streams, loads.decoded + 8)
        steady = Steady.of(
            self.watch.taken(lambda: self._generate(prompts, output), look),
            loads.streams,
            loads.decoded,
        )
        shape = f"{loads.streams} x {steady.keys / loads.streams:,.0f}"
        self._decoded("decode, many streams", shape, steady, look)
        self.emit(shared(f"GPU busy, many streams, {self.name}", shape, steady.busy))

    def prompts(self) -> None:
        found, look = [], Look(1, 0)
        for seed in range(4):
            prompt = self._prompts(1, self.loads.prompt, seed)
            steps = self.watch.taken(lambda: self._generate(prompt, 1), look if seed == 3 else None)  # noqa: B023 - it runs at once
            found.append(steps[0].began.until(steps[-1].ended))
        bound_s = bound_of(
            self.settings.need_ceilings(),
            operations=self.shape.prefill_operations(self.loads.prompt),
        )
        self.emit(
            timed(
                f"prefill, {self.name}",
                f"1 x {self.loads.prompt:,}",
                statistics.median(found[1:3]),
                bound_s=bound_s,
                steps=len(steps),
            )
        )
        self.emit({"profile": f"prefill, {self.name}", **look.found()})

    def offered(self) -> None:
        """Measures tokens per second of wall-clock time, for the section `transformers`."""
        count, prompt, output = self.loads.offered
        self._generate(self._prompts(2, prompt), 4)
        prompts = self._prompts(count, prompt, 7)
        began = time.perf_counter()
        self._generate(prompts, output)
        self.emit(
            {
                "offered": "octavo",
                "requests": [count, prompt, output],
                "tokens_per_s": count * output / (time.perf_counter() - began),
            }
        )

    def _decoded(self, work: str, shape: str, steady: Steady, look: Look) -> None:
        read = weight_bytes_read(program_of(self.llm)) + self.shape.kv_bytes(round(steady.keys))
        bound_s = bound_of(self.settings.need_ceilings(), num_bytes=read)
        more = {
            "bytes": read,
            "steps": len(steady.steps),
            "busy": round(steady.busy, 4),
            "host_ms": round(1e3 * steady.host_s, 3),
        }
        self.emit(timed(f"{work}, {self.name}", shape, steady.step_s, bound_s=bound_s, **more))
        self.emit({"profile": f"{work}, {self.name}", **look.found()})

    def _prompts(self, count: int, length: int, seed: int = 0) -> list[dict[str, list[int]]]:
        draw = random.Random(seed)
        return [
            {"prompt_token_ids": [draw.randrange(10, self.shape.vocab) for _ in range(length)]}
            for _ in range(count)
        ]

    def _generate(self, prompts: list[dict[str, list[int]]], num_output: int) -> None:
        generate(self.llm, prompts, num_output)


def generate(
    llm: LLM, prompts: list[dict[str, list[int]]], num_output: int, **options: Any
) -> None:
    """Generates `num_output` tokens for each prompt; raises RuntimeError if a request fails."""
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    faults = [output.error for output in outputs if output.error is not None]
    if faults:
        raise RuntimeError(
            f"{len(faults)} of {len(outputs)} requests failed, the first with: {faults[0]}"
        )


def weight_bytes_read(program: TorchProgram) -> int:
    """Returns the bytes of weights that a step reads: all but tables, of which only rows are looked
    up.
    """
    tables = {op.table for op in program.program.ops if isinstance(op, Embedding)}
    heads = {
        weight
        for op in program.program.ops
        if not isinstance(op, Embedding)
        for weight in op.weights
    }
    return program.weight_bytes - sum(
        program._weights.matrix(table).num_bytes for table in tables - heads
    )
