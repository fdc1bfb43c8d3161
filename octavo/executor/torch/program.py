"""A prepared Program on a PyTorch device: copies inputs, runs ops in order, samples, and returns
results.

Token rows pass through the body once; sampled rows pass through the head in chunks, so that no `[T,
V]` array exists. With `rows_alone` each row is computed in a separate step, so shapes do not depend
on other rows.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.api.errors import BackendUnavailable
from octavo.api.outputs import OpProfile, Profile
from octavo.executor.base import Runnable
from octavo.executor.batch import (
    LastTokens,
    SampleResult,
    SamplingBatch,
    StepBatch,
    StepOutput,
    Verify,
)
from octavo.executor.kv import KvCache, KvLayout
from octavo.executor.torch.adapters import TorchAdapters
from octavo.executor.torch.attention.call import AttentionKernels
from octavo.executor.torch.compilations import COMPILATIONS
from octavo.executor.torch.fetch import Fetch, PendingStep, translate_out_of_memory
from octavo.executor.torch.graphs import (
    DecodeGraphs,
    Graph,
    GraphShape,
    PaddedStep,
    Record,
    step_to_capture,
)
from octavo.executor.torch.instructions import Instruction, Instructions
from octavo.executor.torch.invariant import joined, rows_alone
from octavo.executor.torch.kernels import Kernels
from octavo.executor.torch.kv_cache import TorchKvCache
from octavo.executor.torch.mixers import states_kept
from octavo.executor.torch.ranks import TorchRanks, broadcast_sampled
from octavo.executor.torch.rates import measured_ceilings, wait_for
from octavo.executor.torch.row_ops import norms_ahead
from octavo.executor.torch.sampling import (
    GREEDY,
    SamplerOutput,
    SamplingStages,
    get_sampling_stages,
    join_results,
    make_sampling_arrays,
    sample,
)
from octavo.executor.torch.step import Staging, Step, step_arrays
from octavo.executor.torch.weights.program_weights import ProgramWeights
from octavo.program import ops
from octavo.program.ops import Linear
from octavo.program.program import Op, Program
from octavo.utils.progress import Bar

CODES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_ROWS = 128
"""Sampled rows per pass through the head; for a vocabulary of 150,000 an fp64 array takes 154 MB.
"""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Device, dtype, kernels and limits shared by a backend's prepared Programs."""

    device: torch.device
    dtype: torch.dtype
    attention: AttentionKernels
    kernels: Kernels
    batch_invariant: bool
    rows_alone: bool
    """Whether `batch_invariant` is implemented by computing each row in a separate step, instead of
    by kernels with fixed tiles.
    """
    num_threads: int | None
    staging_bytes: int
    """Buffer size for the largest step's inputs."""
    max_rows: int
    """Number of persistent rows with a stored last token."""
    ranks: TorchRanks | None = None
    """Ranks that share the Program, of which the first samples; None with one rank."""


@dataclass(frozen=True, slots=True)
class ChunkSampling:
    """Sampling of one chunk of a step's sampled rows."""

    chunk: slice
    stages: SamplingStages
    arrays: dict[str, NDArray]


ValuesOf = Callable[[slice], dict[str, Tensor]]


class TorchProgram(Runnable):
    """A prepared Program."""

    backend_name = "torch"

    def __init__(
        self,
        program: Program,
        weights: ProgramWeights,
        runtime: Runtime,
        kv_layouts: tuple[KvLayout, ...],
    ) -> None:
        self.program = program
        self.kv_layouts = kv_layouts
        self._weights = weights
        self._runtime = runtime
        self.instructions = Instructions.of(
            program, write_with_rope=runtime.attention.rope_write is not None
        )
        self._norms_ahead = norms_ahead([instruction.op for instruction in self.instructions.body])
        self._adapters = TorchAdapters(program, runtime.device, runtime.dtype)
        self._attention_arrays = runtime.attention.get_arrays_maker(program)
        self._progress = 0
        self._staging = Staging(runtime.device, runtime.staging_bytes)
        self._late_staging = Staging(runtime.device)
        self._last_tokens = torch.zeros(
            runtime.max_rows + 1, dtype=torch.int32, device=runtime.device
        )
        """Last token sampled for each persistent row, `[N + 1]`; the spare entry is for other rows.
        """
        self._graphs: DecodeGraphs | None = None
        self._times: OpTimes | None = None

    @property
    def adapters(self) -> TorchAdapters:
        return self._adapters

    @property
    def progress(self) -> int:
        """Number of ops executed so far."""
        return self._progress

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def num_late_compilations(self) -> int:
        return COMPILATIONS.num_late

    def start_profile(self) -> None:
        self._times = OpTimes(self._weights, self._runtime.device, self._runtime.dtype)

    def stop_profile(self) -> Profile:
        if self._times is None:
            raise BackendUnavailable("profiling was not started")
        times, self._times = self._times, None
        return times.result(self.weight_bytes)

    def run(self, batch: StepBatch, kv: KvCache, verify: Verify | None = None) -> StepOutput:
        assert verify is None, "nothing is verified on this backend"
        return self.launch(batch, kv).result()

    def launch(self, batch: StepBatch, kv: KvCache) -> PendingStep:
        """Queues a step's kernels and returns the pending step. On the CPU the step is complete on
        return.
        """
        assert isinstance(kv, TorchKvCache)
        self._set_threads()
        with translate_out_of_memory():
            return self._launch(batch, kv)

    def _launch(self, batch: StepBatch, kv: TorchKvCache) -> PendingStep:
        fetch = Fetch(self._runtime.device)
        with torch.inference_mode():
            if not self._runtime.rows_alone:
                finish = self._run(batch, kv, fetch)
                return fetch.then(finish)
            with states_kept(self.program, batch, kv):
                row_finishes = [
                    (part.sample, self._run(part.batch, kv, fetch)) for part in rows_alone(batch)
                ]
        sampled = [
            finish
            for sample, finish in sorted(row_finishes, key=lambda entry: entry[0])
            if sample >= 0
        ]
        return fetch.then(lambda: joined(batch, [finish() for finish in sampled]))

    def capture(
        self, kv: TorchKvCache, shapes: Sequence[GraphShape], width: int, record: Record
    ) -> None:
        """Captures steps of these shapes as graphs over this KV cache, with block tables of at most
        `width` blocks; matching steps replay them.
        """
        graphs: dict[GraphShape, Graph] = {}
        with Bar("graphs", len(shapes)) as bar, torch.inference_mode():
            for shape in sorted(shapes, key=lambda one: one.num_rows, reverse=True):
                batch = step_to_capture(
                    shape, width, len(kv.groups), ops.num_position_axes(self.program)
                )
                inputs = self._staging.put(self._arrays(batch, kv, fixed=True))
                graphs[shape] = record(partial(self._decode, batch, kv, inputs))
                bar.advance()
        self._graphs = DecodeGraphs(graphs, width)

    def _decode(self, batch: StepBatch, kv: TorchKvCache, inputs: dict[str, Tensor]) -> Tensor:
        """Computes the logits of all rows."""
        step = self._new_step(batch, kv, inputs)
        self._execute(self.instructions.body, step)
        return self._through_head(step, step.inputs["sample_rows"])[
            self.program.outputs["logits"].name
        ]

    def _run(self, batch: StepBatch, kv: TorchKvCache, fetch: Fetch) -> Callable[[], StepOutput]:
        """Queues one step; returns a function that makes its output once `fetch` has completed."""
        if any(value.axis == "requests" for value in self.program.outputs.values()):
            # The head computes one row per request, all at once.
            batch = dataclasses.replace(batch, sample_rows=batch.sample_rows[:0])
        chunks = [
            slice(start, min(start + HEAD_ROWS, len(batch.sample_rows)))
            for start in range(0, len(batch.sample_rows), HEAD_ROWS)
        ]
        samplings = (
            []
            if batch.sampling is None
            else self._make_chunk_samplings(batch, batch.sampling, chunks)
        )
        if batch.adapter_rows is not None and not (batch.adapter_rows >= 0).any():
            batch = dataclasses.replace(batch, adapter_rows=None)
        replays = self._times is None and self._adapters.are_in_graphs(batch.adapter_rows)
        padded = self._graphs.padded(batch) if self._graphs is not None and replays else None
        sampling_inputs = {
            f"{index}/{name}": array
            for index, part in enumerate(samplings)
            for name, array in part.arrays.items()
        }
        computed = batch if padded is None else padded.batch
        late_inputs = sampling_inputs | source_arrays(computed.last_tokens)
        if padded is not None and not padded.in_order:
            late_inputs["logit_rows"] = padded.rows
        inputs = self._put(self._arrays(computed, kv, fixed=padded is not None), late_inputs)
        self._take_last_tokens(inputs)
        values_of = (
            self._replay(padded, inputs)
            if padded is not None
            else self._compute(self._new_step(batch, kv, inputs))
        )
        if batch.sampling is None:
            return self._outputs(chunks, fetch, values_of)
        return self._make_sample_output(samplings, inputs, fetch, values_of)

    def _replay(self, padded: PaddedStep, inputs: dict[str, Tensor]) -> ValuesOf:
        assert self._graphs is not None
        logits = self._graphs.graphs[padded.shape].replay()
        rows, name = inputs.get("logit_rows"), self.program.outputs["logits"].name
        return lambda chunk: {name: logits[chunk] if rows is None else logits[rows[chunk]]}

    def _compute(self, step: Step) -> ValuesOf:
        self._execute(self.instructions.body, step)
        return lambda chunk: self._through_head(step, step.inputs["sample_rows"][chunk])

    def _make_chunk_samplings(
        self, batch: StepBatch, sampling: SamplingBatch, chunks: Sequence[slice]
    ) -> list[ChunkSampling]:
        """Returns the sampling setup of each chunk.

        Each chunk computes as many top logprobs as the whole step needs, because the chunks' arrays
        are joined.
        """
        vocab_size, spare = self.program.vocab_size, self._runtime.max_rows
        whole = get_sampling_stages(sampling, vocab_size)
        made = []
        for chunk in chunks:
            part = sampling if len(chunks) == 1 else sampling.part(chunk.start, chunk.stop)
            stages = whole
            if whole != GREEDY and len(chunks) > 1:
                stages = dataclasses.replace(
                    get_sampling_stages(part, vocab_size),
                    num_top=whole.num_top,
                    surprises=whole.surprises,
                )
            arrays = make_sampling_arrays(part, stages)
            arrays |= target_arrays(batch.last_tokens, chunk, spare=spare)
            made.append(ChunkSampling(chunk, stages, arrays))
        return made

    def _take_last_tokens(self, inputs: dict[str, Tensor]) -> None:
        """Replaces token ids that only the device knows, in place because graphs read that
        address.
        """
        sources = inputs.get("last_sources")
        if sources is not None:
            token_ids = inputs["token_ids"][: len(sources)]
            token_ids.copy_(
                torch.where(sources >= 0, self._last_tokens[sources.clamp(min=0)], token_ids)
            )

    def _keep_last_tokens(self, inputs: dict[str, Tensor], sampled: SamplerOutput) -> None:
        targets = inputs.get("last_targets")
        if targets is not None:
            self._last_tokens.index_copy_(0, targets, sampled.token_ids.int())

    def _new_step(self, batch: StepBatch, kv: TorchKvCache, inputs: dict[str, Tensor]) -> Step:
        runtime = self._runtime
        return Step(
            program=self.program,
            weights=self._weights,
            dtype=runtime.dtype,
            device=runtime.device,
            batch=batch,
            kv=kv.groups,
            inputs=inputs,
            attention=runtime.attention,
            kernels=runtime.kernels,
            norms_ahead=self._norms_ahead,
            ranks=runtime.ranks,
            adapters=None if batch.adapter_rows is None else self._adapters,
        )

    def _arrays(self, batch: StepBatch, kv: TorchKvCache, *, fixed: bool) -> dict[str, NDArray]:
        return step_arrays(batch, kv.num_blocks) | self._attention_arrays(batch, fixed=fixed)

    def _put(self, arrays: dict[str, NDArray], sampling: dict[str, NDArray]) -> dict[str, Tensor]:
        """Copies arrays to the device in one transfer, unless the sampling masks exceed the
        buffer.
        """
        if self._staging.fits(arrays | sampling):
            return self._staging.put(arrays | sampling)
        return self._staging.put(arrays) | self._late_staging.put(sampling)

    def _outputs(
        self, chunks: list[slice], fetch: Fetch, values_of: ValuesOf
    ) -> Callable[[], StepOutput]:
        """Returns a function that computes the Program's outputs from `values_of`, chunk by
        chunk.
        """
        chunk_values = [values_of(chunk) for chunk in chunks or [slice(0, 0)]]
        outputs = self.program.outputs.items()
        arrays = {
            name: fetch.take(torch.cat([part[value.name] for part in chunk_values]).float())
            for name, value in outputs
        }
        return lambda: StepOutput(arrays={name: array.numpy() for name, array in arrays.items()})

    def _make_sample_output(
        self,
        samplings: list[ChunkSampling],
        inputs: dict[str, Tensor],
        fetch: Fetch,
        values_of: ValuesOf,
    ) -> Callable[[], StepOutput]:
        """Returns a function that builds the result with the sampled tokens."""
        sampled: list[SamplerOutput] = []
        for index, part in enumerate(samplings):
            own = {name: inputs[f"{index}/{name}"] for name in part.arrays}
            if part.stages.last_ids:
                own["last_ids"] = self._last_tokens[own["last_targets"]]
            one = self._sample(
                values_of(part.chunk)[self.program.outputs["logits"].name], own, part.stages
            )
            self._keep_last_tokens(own, one)
            sampled.append(fetch.copy_sampled(one))
        return lambda: StepOutput(
            join_results(sampled)
            if sampled
            else SampleResult(np.zeros(0, np.int32), np.zeros(0, np.bool_))
        )

    def _sample(
        self, logits: Tensor, inputs: dict[str, Tensor], stages: SamplingStages
    ) -> SamplerOutput:
        """Samples tokens; with several ranks the first samples and broadcasts."""
        ranks, kernels = self._runtime.ranks, self._runtime.kernels
        if ranks is None:
            return sample(logits, inputs, stages, kernels)
        return broadcast_sampled(
            ranks, sample(logits, inputs, stages, kernels) if ranks.rank == 0 else None, len(logits)
        )

    def _through_head(self, step: Step, sample_rows: Tensor) -> dict[str, Tensor]:
        head = dataclasses.replace(step, inputs=step.inputs | {"sample_rows": sample_rows})
        head.values = dict(step.values)
        self._execute(self.instructions.head, head)
        return head.values

    def _execute(self, instructions: list[Instruction], step: Step) -> None:
        for instruction in instructions:
            if self._times is None:
                instruction.run(step)
            else:
                rows = next((len(step.values[value.name]) for value in instruction.op.inputs), 0)
                self._times.run(instruction.op, rows, partial(instruction.run, step))
            self._progress += 1

    def _set_threads(self) -> None:
        """Sets PyTorch's thread count, which is per process: another engine may have changed it."""
        num_threads = 1 if self._runtime.batch_invariant else self._runtime.num_threads
        if num_threads is not None and torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)


def source_arrays(last: LastTokens | None) -> dict[str, NDArray]:
    """Returns `last_sources [T]`, -1 if the host knows the token id; empty if it knows all ids.

    Step arrays that read and store the last sampled tokens of persistent rows on the device
    (`batch.LastTokens`).
    """
    if last is None or not (last.sources >= 0).any():
        return {}
    return {"last_sources": last.sources.astype(np.int64)}


def target_arrays(last: LastTokens | None, samples: slice, *, spare: int) -> dict[str, NDArray]:
    """Returns `last_targets [S]` of sampled rows, with `spare` for rows without a
    persistent row.
    """
    if last is None:
        return {}
    targets = last.targets[samples].astype(np.int64)
    return {"last_targets": np.where(targets < 0, spare, targets)}


@dataclass(slots=True)
class _Times:
    calls: int = 0
    seconds: float = 0.0
    num_bytes: float = 0.0
    operations: float = 0.0


class OpTimes:
    """Accumulated times and work of ops. `dtype` is the compute dtype of matmuls.

    On CUDA every op is synchronized while profiling, and graphs are not replayed.

    Bytes and operations are counted for matmuls only.
    """

    def __init__(self, weights: ProgramWeights, device: torch.device, dtype: torch.dtype) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._times: dict[tuple[str, str], _Times] = {}

    def run(self, op: Op, num_rows: int, run: Callable[[], None]) -> None:
        wait_for(self._device)
        began = time.perf_counter()
        run()
        wait_for(self._device)
        linear = isinstance(op, Linear)
        times = self._times.setdefault((op.kind, CODES[self._dtype] if linear else ""), _Times())
        times.calls, times.seconds = times.calls + 1, times.seconds + time.perf_counter() - began
        if isinstance(op, Linear):
            times.num_bytes += sum(part.num_bytes for part in self._weights.product(op).parts)
            times.operations += (
                2 * num_rows * sum(math.prod(weight.shape) for weight in op.weights_)
            )

    def result(self, weight_bytes: int) -> Profile:
        ops = [
            OpProfile(name, code, t.calls, t.seconds, t.num_bytes, t.operations)
            for (name, code), t in self._times.items()
        ]
        ceilings = measured_ceilings(weight_bytes, self._dtype, self._device)
        return Profile(ops, ceilings.bandwidth, {CODES[self._dtype]: ceilings.operations})
