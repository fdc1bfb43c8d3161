"""A Program prepared by the native backend: runs a step, or several decode steps, per call.

Owns the arrays that a call fills and access to the last step's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import EngineDead
from octavo.api.outputs import OpProfile, Profile
from octavo.engine.protocol.step import WeightArrivals
from octavo.executor.base import Runnable
from octavo.executor.batch import (
    MAX_CANDIDATES,
    MAX_PROOF_TOKENS,
    DecodedStep,
    DecodeSteps,
    Resample,
    SampledLogits,
    SampleResult,
    SamplingBatch,
    StepBatch,
    StepOutput,
    Verify,
    empty_batch,
)
from octavo.executor.kv import KvCache, KvLayout
from octavo.executor.native.adapters import NativeAdapters
from octavo.executor.native.extension import native_module
from octavo.executor.native.offload import StreamedWeights
from octavo.executor.native.ranks import SharedMemoryRanks
from octavo.program.low_rank import Site
from octavo.program.ops import num_position_axes
from octavo.program.passes.adapters import find_table_sites
from octavo.program.program import Program

MANY_ROWS = 32
"""Rows of the matmul that is measured as the machine's matmul rate: two row tiles."""


class NativeProgram(Runnable):
    backend_name = "native"

    def __init__(
        self,
        device: Any,
        runner: Any,
        program: Program,
        weight_bytes: int,
        kv_layouts: tuple[KvLayout, ...],
        *,
        sites: Sequence[Site],
        streamed: StreamedWeights | None = None,
        ranks: SharedMemoryRanks | None = None,
    ) -> None:
        self.kv_layouts = kv_layouts
        self._adapters = NativeAdapters(runner, sites, find_table_sites(program))
        self._native = native_module()
        self._device = device
        self._runner = runner
        self._vocab_size = program.vocab_size
        self._sampled_logits = NativeLogits(runner, program.vocab_size)
        self._num_axes = num_position_axes(program)
        hidden = program.inputs.get("hidden")
        self._in_width = None if hidden is None else hidden.width
        ((self._output, value),) = program.outputs.items()
        self._output_axis, self._out_width = value.axis, value.width
        self._weight_bytes = weight_bytes
        self._streamed = streamed
        self._ranks = ranks

    @property
    def adapters(self) -> NativeAdapters:
        return self._adapters

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    @property
    def progress(self) -> int:
        return int(self._runner.progress)

    @property
    def kv_writes(self) -> Sequence[tuple[int, int]]:
        writes: list[tuple[int, int]] = self._runner.plan.kv_writes
        return writes

    @property
    def kv_written(self) -> tuple[int, int]:
        written: tuple[int, int] = self._runner.kv_written
        return written

    @property
    def arrivals(self) -> WeightArrivals | None:
        return None if self._streamed is None else self._streamed.arrivals()

    def start_profile(self) -> None:
        self._runner.profile(True)

    def stop_profile(self) -> Profile:
        ops = [OpProfile(*row) for row in self._runner.profiled()]
        self._runner.profile(False)
        rates = {op.code: self._device.product_rate(op.code, MANY_ROWS) for op in ops if op.code}
        return Profile(
            ops, self._device.read_bandwidth(self._weight_bytes), rates, self._device.hop_seconds()
        )

    @property
    def max_verified(self) -> int:
        """Maximum number of sampled rows whose logits are in memory at the same time."""
        return int(self._native.SAMPLE_CHUNK)

    @property
    def max_forced_requests(self) -> int:
        """Maximum number of requests of a step to which forced tokens are appended.

        Above some number of rows, the time of a step is proportional to its rows, so appending
        saves nothing; and if the threads divide the rows evenly, one more row makes the division
        uneven.
        """
        return max(1, int(self._runner.rows_of_blocks) - 1)

    def join(self, kv: KvCache) -> None:
        num_groups = len(self.kv_layouts)
        self.run(empty_batch(num_groups, self._num_axes, self._in_width), kv)

    def run(self, batch: StepBatch, kv: KvCache, verify: Verify | None = None) -> StepOutput:
        if self._output_axis == "requests":
            # The LM head computes one row per request.
            batch = replace(batch, sample_rows=np.maximum(batch.query_starts[1:] - 1, 0))
        num_rows = len(batch.token_ids if self._output == "hidden" else batch.sample_rows)
        if batch.sampling is None:
            rows = np.empty((num_rows, self._out_width), np.float32)
            output = StepOutput(arrays={self._output: rows})
        else:
            output = StepOutput(_empty_result(batch.sampling, num_rows, self._vocab_size))
        samples = output.samples
        check_step = (
            None
            if verify is None or samples is None
            else lambda index: verify(samples, self._sampled_logits)
        )
        with fatal_as_engine_dead():
            self._runner.run(batch, output, kv, check_step)
        if samples is not None and self._ranks is not None:
            # Only the first rank's sample counts: the others may lack grammars and histories.
            self._ranks.from_first(samples.token_ids)
            self._ranks.from_first(samples.failed)
        return output

    def decode(
        self,
        batch: StepBatch,
        kv: KvCache,
        steps: DecodeSteps,
        verify: Verify | None,
    ) -> Iterator[DecodedStep]:
        assert batch.sampling is not None
        num_rows = len(batch.sample_rows)
        whole = _empty_result(batch.sampling, num_rows * steps.num_steps, self._vocab_size)
        call = self._native.DecodeCall(self._runner, batch, StepOutput(whole), kv, steps)
        check_step: Callable[[int], Resample | None] | None = None
        goes_on, first = True, 0
        while goes_on:
            samples = whole.part(first, first + num_rows)
            if verify is not None:
                check_step = lambda _, samples=samples: verify(samples, self._sampled_logits)  # noqa: E731
            try:
                goes_on = call.step(check_step)
            except Exception:
                if first > 0:
                    return  # raised again when this step is computed separately
                with fatal_as_engine_dead():
                    raise
            yield DecodedStep(samples, is_last=not goes_on)
            first += num_rows


class NativeLogits(SampledLogits):
    """The sampled rows of the step that was just run. A `batch.SampledLogits`."""

    def __init__(self, runner: Any, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size

    def logits(self, sample: int) -> NDArray[np.float32]:
        logits = np.empty(self._vocab_size, np.float32)
        self._runner.copy_logits(sample, logits)
        return logits

    def candidates(self, samples: NDArray[np.int32]) -> NDArray[np.int32]:
        token_ids = np.empty((len(samples), MAX_CANDIDATES), np.int32)
        self._runner.candidates(samples, token_ids)
        return token_ids


@contextmanager
def fatal_as_engine_dead() -> Iterator[None]:
    """Raises EngineDead if no further step is possible, because the weight file was truncated or
    another rank ended.
    """
    try:
        yield
    except (native_module().WeightFileTruncated, native_module().RanksAborted) as error:
        raise EngineDead(str(error)) from None


def _empty_result(sampling: SamplingBatch, count: int, vocab_size: int) -> SampleResult:
    result = SampleResult(np.zeros(count, np.int32), np.zeros(count, np.bool_))
    num_logprobs = min(int(sampling.records["num_logprobs"].max(initial=-1)), vocab_size)
    if num_logprobs >= 0:
        result.logprobs = np.zeros(count, np.float32)
        result.ranks = np.zeros(count, np.int32)
        result.top_ids = np.zeros((count, num_logprobs), np.int32)
        result.top_logprobs = np.zeros((count, num_logprobs), np.float32)
    if sampling.records["mirostat_mode"].any():
        result.surprises = np.zeros(count, np.float32)
    if sampling.without_cutoffs is not None:
        result.proof_tokens = np.full((count, MAX_PROOF_TOKENS), -1, np.int32)
    return result
