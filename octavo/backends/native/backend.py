"""The native backend: C++ kernels chosen for this machine, one native call a step, no PyTorch.

Owns the compute threads, the packed weights and the KV memory's layout. Source of the design:
csrc/core/executor.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.backends.base import BackendOptions, Ceilings, Footprint, FormatOf, LoadWeight
from octavo.backends.batch import (
    Check,
    DecodeSteps,
    GoesOn,
    SampleResult,
    SamplingBatch,
    StepBatch,
    StepOutput,
)
from octavo.backends.kv import KvCache, KvLayout, OnDemandKvCache
from octavo.backends.native.check import check, check_ops
from octavo.backends.native.extension import native_module, supported_levels
from octavo.backends.native.footprint import native_footprint
from octavo.backends.native.lower import Lowering
from octavo.backends.native.weights import NativeWeights
from octavo.errors import BackendUnavailable, ConfigError
from octavo.outputs import OpProfile, Profile
from octavo.program.ops import PRODUCTS
from octavo.program.passes.expert_gates import fold_expert_gates
from octavo.program.passes.latents import absorb_latents
from octavo.program.passes.optimize import optimize
from octavo.program.program import CacheGroup, Program

KV_DTYPES = ("auto", "fp32", "bf16", "int8")

MANY_ROWS = 32
"""Rows of the product whose rate counts as the machine's: two tiles of rows."""


def layout_of(group: CacheGroup, dtype: str) -> KvLayout:
    """Returns the layout of a group kept as `dtype`: fp32, bf16 or int8. Each kv head's keys and
    values are a piece.
    """
    layer_bytes = native_module().kv_layer_bytes(
        group.num_kv_heads, group.k_width, group.v_width, dtype
    )
    return KvLayout(group, dtype, (layer_bytes // group.num_kv_heads,) * group.num_kv_heads)


class NativeBackend:
    """`level` names an instruction set; the best one otherwise."""

    name = "native"

    def __init__(self, options: BackendOptions, *, level: str | None = None) -> None:
        if options.kv_cache_dtype not in KV_DTYPES:
            got = (
                f"kv_cache_dtype: the native backend has {', '.join(KV_DTYPES)}, got"
                f" {options.kv_cache_dtype}"
            )
            raise BackendUnavailable(
                got, hint="int8 takes as much memory as fp8 and is the more exact"
            )
        self.options = options
        native = native_module()
        supported = supported_levels()
        if level is not None and level not in supported:
            raise BackendUnavailable(
                f"cpu_level {level!r}: this machine runs {', '.join(supported)}",
                hint="leave cpu_level at auto",
            )
        kernels = Path(native.__file__).parent
        num_threads = options.num_threads or 1
        try:
            self._device = native.Device(num_threads, str(kernels), level or supported[-1])
        except (RuntimeError, MemoryError) as error:
            what = f"the native backend does not start with {num_threads} threads: {error}"
            raise BackendUnavailable(what, hint="give fewer --threads") from None
        self.numerics = self.level
        self._optimized: tuple[Program, Program] | None = None

    @property
    def level(self) -> str:
        return str(self._device.level)

    def check(self, program: Program, format_of: FormatOf) -> None:
        check(self._optimize(program), format_of, self._device.row_type)

    def prepare(self, program: Program, load: LoadWeight) -> NativeProgram:
        optimized = self._optimize(program)
        check_ops(optimized)
        weights = NativeWeights(self._device, load, self.options.dtype)
        executor = native_module().Executor(
            self._device, self.options.max_tokens, program.vocab_size
        )
        executor.share_prefixes(self.options.shared_prefix_attention)
        Lowering(optimized, executor, weights).run()
        weights.pack()
        products = [op for op in optimized.ops if isinstance(op, PRODUCTS)]
        computes_fp32 = all(weights.reads_fp32(op) for op in products)
        return NativeProgram(
            self._device,
            executor,
            program,
            weights.num_bytes,
            self._kv_layouts(program, computes_fp32=computes_fp32),
        )

    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        found = native_footprint(
            self._optimize(program), format_of, self._device.row_type, self.options.max_tokens
        )
        layouts = self._kv_layouts(program, computes_fp32=found.computes_fp32)
        return Footprint(found.weight_bytes, found.step_bytes, layouts, found.code)

    def measure(self, num_bytes: int, code: str) -> Ceilings:
        return Ceilings(
            self._device.read_bandwidth(num_bytes), self._device.product_rate(code, MANY_ROWS)
        )

    def allocate(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> KvCache:
        return self._allocate(layouts, num_blocks, on_demand=False)

    def allocate_on_demand(
        self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]
    ) -> OnDemandKvCache:
        return self._allocate(layouts, num_blocks, on_demand=True)

    def _allocate(
        self, layouts: Sequence[KvLayout], num_blocks: Sequence[int], *, on_demand: bool
    ) -> OnDemandKvCache:
        shapes = [
            (
                layout.group.num_layers,
                layout.group.num_kv_heads,
                layout.group.k_width,
                layout.group.v_width,
                layout.dtype,
                count,
            )
            for layout, count in zip(layouts, num_blocks, strict=True)
        ]
        try:
            memory: OnDemandKvCache = native_module().KvMemory(shapes)
        except MemoryError:
            needed = sum(
                layout.block_bytes * count
                for layout, count in zip(layouts, num_blocks, strict=True)
            )
            what = "addresses" if on_demand else "bytes"
            hint = (
                "lower max_num_seqs or max_model_len"
                if on_demand
                else "lower kv_cache_memory_bytes"
            )
            raise ConfigError(
                f"the KV cache needs {needed} {what}, which the system does not give", hint=hint
            ) from None
        return memory

    def close(self) -> None:
        """Threads end with the last prepared program."""

    def _optimize(self, program: Program) -> Program:
        """Returns the optimized Program; keeps the last one, as a footprint is followed by its
        preparation.
        """
        if self._optimized is None or self._optimized[0] is not program:
            optimized = absorb_latents(fold_expert_gates(optimize(program)))
            self._optimized = (program, optimized)
        return self._optimized[1]

    def _kv_layouts(self, program: Program, *, computes_fp32: bool) -> tuple[KvLayout, ...]:
        """Returns a Program's layouts; auto follows the precision of its products."""
        asked = self.options.kv_cache_dtype
        dtype = asked if asked != "auto" else "fp32" if computes_fp32 else "bf16"
        if dtype == "int8" and any(group.kind == "latent" for group in program.groups):
            raise BackendUnavailable(
                "kv_cache_dtype: the native backend keeps latents as fp32 or bf16, got int8",
                hint="a latent takes a small part of what keys and values of all heads would",
            )
        return tuple(layout_of(group, dtype) for group in program.groups)


class NativeProgram:
    """A prepared Program."""

    def __init__(
        self,
        device: Any,
        executor: Any,
        program: Program,
        weight_bytes: int,
        kv_layouts: tuple[KvLayout, ...],
    ) -> None:
        self.kv_layouts = kv_layouts
        self._device = device
        self._executor = executor
        self._vocab_size = program.vocab_size
        ((self._output, value),) = program.outputs.items()
        self._out_width = value.width
        self._weight_bytes = weight_bytes

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    @property
    def progress(self) -> int:
        return int(self._executor.stages_done)

    def start_profile(self) -> None:
        self._executor.profile(True)

    def stop_profile(self) -> Profile:
        ops = [OpProfile(*row) for row in self._executor.profiled()]
        self._executor.profile(False)
        rates = {op.code: self._device.product_rate(op.code, MANY_ROWS) for op in ops if op.code}
        return Profile(
            ops, self._device.read_bandwidth(self._weight_bytes), rates, self._device.hop_seconds()
        )

    @property
    def max_checked(self) -> int:
        """Most sampled rows whose logits lie in memory together."""
        return int(native_module().SAMPLE_CHUNK)

    def run(self, batch: StepBatch, kv: KvCache) -> StepOutput:
        return self._run(batch, kv, None)

    def run_checked(self, batch: StepBatch, kv: KvCache, check: Check) -> StepOutput:
        return self._run(batch, kv, check)

    def _run(self, batch: StepBatch, kv: KvCache, check: Check | None) -> StepOutput:
        if self._output == "pooled":
            # The head has a row for each request.
            batch = replace(batch, sample_rows=np.maximum(batch.query_starts[1:] - 1, 0))
        num_rows = len(batch.sample_rows)
        if batch.sampling is None:
            rows = np.empty((num_rows, self._out_width), np.float32)
            output = StepOutput(arrays={self._output: rows})
        else:
            output = StepOutput(_empty_result(batch.sampling, num_rows, self._vocab_size))
        samples = output.samples
        check_step = None if check is None or samples is None else lambda index: check(samples)
        self._executor.run(batch, output, kv, check_step)
        return output

    def decode(
        self,
        batch: StepBatch,
        kv: KvCache,
        steps: DecodeSteps,
        goes_on: GoesOn,
        check: Check | None,
    ) -> list[SampleResult]:
        assert batch.sampling is not None
        num_rows = len(batch.sample_rows)
        whole = _empty_result(batch.sampling, num_rows * steps.num_steps, self._vocab_size)

        def step(index: int) -> SampleResult:
            return whole.part(index * num_rows, (index + 1) * num_rows)

        num_steps = self._executor.decode(
            batch,
            StepOutput(whole),
            kv,
            steps,
            lambda index: goes_on(step(index)),
            None if check is None else lambda index: check(step(index)),
        )
        return [step(index) for index in range(num_steps)]


def _empty_result(sampling: SamplingBatch, count: int, vocab_size: int) -> SampleResult:
    result = SampleResult(np.zeros(count, np.int32), np.zeros(count, np.bool_))
    most = min(int(sampling.records["num_logprobs"].max(initial=-1)), vocab_size)
    if most >= 0:
        result.logprobs = np.zeros(count, np.float32)
        result.ranks = np.zeros(count, np.int32)
        result.top_ids = np.zeros((count, most), np.int32)
        result.top_logprobs = np.zeros((count, most), np.float32)
    if sampling.records["mirostat_mode"].any():
        result.surprises = np.zeros(count, np.float32)
    return result
