"""The reference backend: plain NumPy in float64, the ground truth of every op's tests.

Owns the loop over a Program's ops; formulas are in `ops.py` and `attention.py`, KV arrays in
`kv_cache.py`. Results are bitwise the same alone or batched, chunked or not, because matrix
products run row by row. Everything is float64 regardless of `BackendOptions.dtype`; K and V are
rounded to `kv_cache_dtype` (auto: float64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import BackendUnavailable, ConfigError, WeightMismatch
from octavo.executor.base import (
    Backend,
    BackendOptions,
    Ceilings,
    Footprint,
    FormatOf,
    LoadWeight,
    ObservedInputs,
    Runnable,
)
from octavo.executor.batch import SampleResult, SamplingBatch, StepBatch, StepOutput, Verify
from octavo.executor.kv import BlockRows, KvCache, KvLayout, OnDemandKvCache
from octavo.executor.reference.adapters import ReferenceAdapters
from octavo.executor.reference.attention import ATTENTION_FORMULAS
from octavo.executor.reference.kv_cache import ReferenceKvCache, block_rows, make_kv_layout
from octavo.executor.reference.mixers import MIXER_FORMULAS
from octavo.executor.reference.ops import ROW_FORMULAS
from octavo.executor.reference.step import (
    Exchange,
    Floats,
    ReferenceStep,
    alone,
)
from octavo.executor.sampling import masked, replaced, row_candidates, sample
from octavo.program.ops import Attention, Linear
from octavo.program.program import Op, Program, Weight

FORMULAS = ROW_FORMULAS | ATTENTION_FORMULAS | MIXER_FORMULAS
MASKS = ("causal", "window", "chunk", "full")


@dataclass(slots=True)
class ReferenceRunnable(Runnable):
    backend_name: ClassVar[str] = "reference"
    program: Program
    weights: dict[Weight, Floats]
    kv_layouts: tuple[KvLayout, ...]
    exchange: Exchange = alone
    adapters: ReferenceAdapters = field(default_factory=ReferenceAdapters)
    observed: ObservedInputs | None = None
    """Copies of matmul inputs, filled by each step; None: disabled."""
    progress: int = 0
    """Number of ops computed so far."""

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    @property
    def max_verified(self) -> int:
        return 1 << 30

    def run(self, batch: StepBatch, kv: KvCache, verify: Verify | None = None) -> StepOutput:
        assert isinstance(kv, ReferenceKvCache)
        step = ReferenceStep(
            self.program,
            self.weights,
            batch,
            kv.groups,
            exchange=self.exchange,
            adapters=self.adapters.by_slot,
        )
        with np.errstate(all="ignore"):
            for op in self.program.ops:
                computed = FORMULAS[type(op)](op, step)
                if self.observed is not None and isinstance(op, Linear) and op.x.axis == "tokens":
                    rows = step.get(op.x).astype(np.float32)
                    self.observed.inputs.update(dict.fromkeys(op.weights_, rows))
                for value, array in zip(op.outputs, computed, strict=True):
                    step.values[value.name] = np.ascontiguousarray(array)
                self.progress += 1
            outputs = {
                name: step.values[value.name] for name, value in self.program.outputs.items()
            }
            if batch.sampling is None:
                return StepOutput(arrays=outputs)
            logits = outputs["logits"].astype(np.float32)
            return StepOutput(samples=_sample_verified(logits, batch.sampling, verify))


class ReferenceRows(NamedTuple):
    """The sampled rows of a step. A `batch.SampledLogits`."""

    kept: NDArray[np.float32]
    """`[S, V]`"""
    sampling: SamplingBatch

    def logits(self, sample: int) -> NDArray[np.float32]:
        return np.array(self.kept[sample])

    def candidates(self, samples: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.stack([row_candidates(self.kept[s], self.sampling, s) for s in samples])


def _sample_verified(
    logits: NDArray[np.float32], sampling: SamplingBatch, verify: Verify | None
) -> SampleResult:
    """Samples from `logits [S, V]`, and resamples while `verify` rejects rows."""
    samples = sample(logits, sampling)
    rows = ReferenceRows(logits, sampling)
    while verify is not None:
        resample = verify(samples, rows)
        if resample is None:
            break
        resampled = sample(logits, masked(sampling, resample), replaced(logits, resample))
        samples.take(resampled, resample.samples)
        if resample.is_last:
            break
    return samples


class ReferenceBackend(Backend):
    """With several ranks, `exchange` returns the arrays of all ranks
    (`ranks.py`).
    """

    name = "reference"
    observes_inputs = prepares_parts = allocates_on_demand = True
    numerics = f"NumPy {np.__version__}"

    def __init__(self, options: BackendOptions | None = None, exchange: Exchange = alone) -> None:
        self.options = options or BackendOptions()
        self._exchange = exchange

    def check(self, program: Program, format_of: FormatOf) -> None:
        """Rejects unsupported ops and groups; weights of any format are converted to float64."""
        _check_program(program)

    def prepare_program(self, program: Program, load: LoadWeight) -> ReferenceRunnable:
        _check_program(program)
        weights = {weight: _load(weight, load) for weight in program.weights}
        return ReferenceRunnable(program, weights, self._kv_layouts(program), self._exchange)

    def prepare_program_with_part(
        self, program: Program, part: Program, load: LoadWeight, *, part_tokens: int
    ) -> tuple[ReferenceRunnable, ReferenceRunnable]:
        whole = self.prepare_program(program, load)
        layouts = self._kv_layouts(part)
        return whole, ReferenceRunnable(part, whole.weights, layouts, self._exchange)

    def prepare_observed_program(
        self, program: Program, load: LoadWeight
    ) -> tuple[ReferenceRunnable, ObservedInputs]:
        runnable = self.prepare_program(program, load)
        runnable.observed = ObservedInputs(self.options.max_tokens)
        for op in program.ops:
            if isinstance(op, Linear) and op.x.axis == "tokens":
                rows = np.zeros((self.options.max_tokens, op.x.width), np.float32)
                runnable.observed.inputs.update(dict.fromkeys(op.weights_, rows))
        return runnable, runnable.observed

    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        """Counts weights and Values in float64; Values live until the end of the step."""
        sizes = {weight: 8 * math.prod(weight.shape) for weight in program.weights}
        widths = sum(
            value.width for op in program.ops for value in op.outputs if value.axis == "tokens"
        )
        step_bytes = 8 * widths * self.options.max_tokens
        return Footprint(sizes, step_bytes, self._kv_layouts(program), "fp64")

    def measure(self, num_bytes: int, footprint: Footprint) -> Ceilings:
        raise BackendUnavailable(
            "the reference backend cannot measure its speed",
            hint="set --bandwidth and --flops, or use --backend native",
        )

    def allocate(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> ReferenceKvCache:
        try:
            return ReferenceKvCache(layouts, num_blocks)
        except MemoryError:
            raise ConfigError(
                f"cannot allocate {sum(num_blocks)} KV blocks", hint="lower --kv-cache-memory-bytes"
            ) from None

    def allocate_on_demand(
        self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]
    ) -> OnDemandKvCache:
        return self.allocate(layouts, num_blocks)

    def get_block_rows(self, layout: KvLayout, blocks: NDArray[np.uint8]) -> BlockRows:
        return block_rows(layout, blocks)

    def close(self) -> None:
        """Does nothing: all memory belongs to Python objects."""

    def _kv_layouts(self, program: Program) -> tuple[KvLayout, ...]:
        asked = self.options.kv_cache_dtype
        dtype = "fp64" if asked == "auto" else asked
        return tuple(make_kv_layout(group, dtype) for group in program.groups)


def _check_program(program: Program) -> None:
    for op in program.ops:
        _check_op(program, op)


def _check_op(program: Program, op: Op) -> None:
    if type(op) not in FORMULAS:
        raise _unavailable(program, f"the op {op.kind}")
    if isinstance(op, Attention) and op.mask not in MASKS:
        raise _unavailable(program, f"attention with the mask {op.mask}")


def _unavailable(program: Program, what: str) -> BackendUnavailable:
    return BackendUnavailable(f"the reference backend cannot run {what} (in {program.name})")


def _load(weight: Weight, load: LoadWeight) -> Floats:
    array = load(weight).dequantize().astype(np.float64, order="C")
    if array.shape != weight.shape:
        raise WeightMismatch(f"{weight.name} has shape {array.shape}, expected {weight.shape}")
    return array
