"""The reference backend: NumPy in float64, slow and plain, the ground truth of every op's tests.

Owns the loop over a Program's ops and the KV arrays; the ops' formulas stand in `reference_ops.py`
and `reference_attention.py`. A row's results are bitwise the same alone or in a batch, chunked or
whole: every matrix product is taken row by row. It computes in float64 whatever
`BackendOptions.dtype` says, from the weights as packed; K and V are rounded to `kv_cache_dtype`
(auto: float64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import BackendOptions, Ceilings, Footprint, FormatOf, LoadWeight
from octavo.backends.batch import StepBatch, StepOutput
from octavo.backends.kv import BLOCK_SIZE, KvCache, KvLayout, OnDemandKvCache
from octavo.backends.reference_attention import ATTENTION_FORMULAS
from octavo.backends.reference_on_demand import OnDemandArrays
from octavo.backends.reference_ops import (
    ROW_FORMULAS,
    Exchange,
    Floats,
    GroupArrays,
    Step,
    alone,
    as_is,
)
from octavo.backends.sampling import sample
from octavo.errors import BackendUnavailable, ConfigError, WeightMismatch
from octavo.outputs import Profile
from octavo.program.ops import Attention
from octavo.program.program import CacheGroup, Op, Program, Weight

KV_TYPES: dict[str, np.dtype] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.float32),
    "fp8": np.dtype(np.float32),
}
"""Type of the arrays by its name in a layout. Codes times scales are exact in fp32, so an int8 or
fp8 cache is kept multiplied out.
"""

E4M3_TOP = np.float32(448)

FORMULAS = ROW_FORMULAS | ATTENTION_FORMULAS
MASKS = ("causal", "window", "full")


def as_int8(numbers: Floats) -> Floats:
    """Codes of a token and head times their scale: code = round(x / scale), scale = absmax / 127 in
    bf16, in fp32 as the kernels do it.
    """
    x = numbers.astype(np.float32)
    absmax = abs(x).max(axis=-1, keepdims=True, initial=0)
    scale = (
        np.where(np.isfinite(absmax), absmax / np.float32(127), np.nan)
        .astype(ml_dtypes.bfloat16)
        .astype(np.float32)
    )
    codes = np.where(scale > 0, np.clip(np.rint(x / scale), -127, 127), 0)
    stored: Floats = (codes * scale).astype(np.float64)
    return stored


def as_fp8(numbers: Floats) -> Floats:
    """The same in e4m3: code = x / scale rounded to even, scale = absmax / 448 in bf16."""
    x = numbers.astype(np.float32)
    absmax = abs(x).max(axis=-1, keepdims=True, initial=0)
    scale = (
        np.where(np.isfinite(absmax), absmax / E4M3_TOP, np.nan)
        .astype(ml_dtypes.bfloat16)
        .astype(np.float32)
    )
    codes = np.where(scale > 0, np.clip(x / scale, -E4M3_TOP, E4M3_TOP), 0).astype(
        ml_dtypes.float8_e4m3fn
    )
    stored: Floats = (codes.astype(np.float32) * scale).astype(np.float64)
    return stored


AS_STORED = {"int8": as_int8, "fp8": as_fp8}


class ReferenceKvCache:
    """KV bytes of all groups. Implements `base.OnDemandKvCache`."""

    def __init__(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> None:
        self._memory = [
            OnDemandArrays(_shapes(layout.group, count), KV_TYPES[layout.dtype])
            for layout, count in zip(layouts, num_blocks, strict=True)
        ]
        self.groups = [
            GroupArrays(memory.arrays[0], memory.arrays[1], AS_STORED.get(layout.dtype, as_is))
            for memory, layout in zip(self._memory, layouts, strict=True)
        ]

    def copy_block(self, group: int, source: int, target: int) -> None:
        for array in (self.groups[group].k, self.groups[group].v):
            array[:, target] = array[:, source]

    def read_block(self, group: int, block_id: int, into: NDArray[np.uint8]) -> None:
        k, v = self.groups[group].k[:, block_id], self.groups[group].v[:, block_id]
        into[: k.nbytes] = np.ascontiguousarray(k).reshape(-1).view(np.uint8)
        into[k.nbytes :] = np.ascontiguousarray(v).reshape(-1).view(np.uint8)

    def write_block(self, group: int, block_id: int, data: NDArray[np.uint8]) -> None:
        arrays = self.groups[group]
        k, v = arrays.k[:, block_id], arrays.v[:, block_id]
        k[...] = data[: k.nbytes].view(k.dtype).reshape(k.shape)
        v[...] = data[k.nbytes :].view(v.dtype).reshape(v.shape)

    def give_back(self, group: int, first_block: int, num_blocks: int) -> None:
        self._memory[group].give_back(first_block, num_blocks)

    def spans(self, group: int) -> list[tuple[int, int]]:
        return [(array.ctypes.data, array.nbytes) for array in self._memory[group].arrays]


def _shapes(group: CacheGroup, num_blocks: int) -> list[tuple[int, ...]]:
    shape = (group.num_layers, num_blocks, BLOCK_SIZE, group.num_kv_heads)
    return [(*shape, group.k_width), (*shape, group.v_width)]


@dataclass(slots=True)
class ReferenceRunnable:
    """A Program and its weights. Implements `base.Runnable`."""

    program: Program
    weights: dict[Weight, Floats]
    kv_layouts: tuple[KvLayout, ...]
    exchange: Exchange = alone
    progress: int = 0
    """Ops computed, ever."""

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    def start_profile(self) -> None:
        raise BackendUnavailable(
            "the reference backend times no ops", hint="profile with --backend native"
        )

    def stop_profile(self) -> Profile:
        raise BackendUnavailable("no profile was started")

    def run(self, batch: StepBatch, kv: KvCache) -> StepOutput:
        assert isinstance(kv, ReferenceKvCache)
        step = Step(self.program, self.weights, batch, kv.groups, exchange=self.exchange)
        with np.errstate(all="ignore"):
            for op in self.program.ops:
                made = FORMULAS[type(op)](op, step)
                for value, array in zip(op.outputs, made, strict=True):
                    step.values[value.name] = np.ascontiguousarray(array)
                self.progress += 1
            outputs = {
                name: step.values[value.name] for name, value in self.program.outputs.items()
            }
            if batch.sampling is None:
                return StepOutput(arrays=outputs)
            return StepOutput(samples=sample(outputs["logits"].astype(np.float32), batch.sampling))


class ReferenceBackend:
    """Implements `base.Backend`. `exchange`: with the other ranks, where there are any
    (`reference_ranks.py`).
    """

    name = "reference"
    numerics = f"NumPy {np.__version__}"

    def __init__(self, options: BackendOptions | None = None, exchange: Exchange = alone) -> None:
        self.options = options or BackendOptions()
        self._exchange = exchange

    def prepare(self, program: Program, load: LoadWeight) -> ReferenceRunnable:
        for op in program.ops:
            _check_op(program, op)
        for group in program.groups:
            if group.kind == "state":
                raise _refused(program, f"cache groups of kind {group.kind}")
        weights = {weight: _load(weight, load) for weight in program.weights}
        return ReferenceRunnable(program, weights, self._kv_layouts(program), self._exchange)

    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        """Everything is float64, and every Value of a step lives to its end."""
        sizes = {weight: 8 * math.prod(weight.shape) for weight in program.weights}
        widths = sum(
            value.width for op in program.ops for value in op.outputs if value.axis == "tokens"
        )
        step_bytes = 8 * widths * self.options.max_tokens
        return Footprint(sizes, step_bytes, self._kv_layouts(program), "fp64")

    def measure(self, num_bytes: int, code: str) -> Ceilings:
        raise BackendUnavailable(
            "the reference backend is not made for speed",
            hint="give --bandwidth and --flops, or plan for native",
        )

    def allocate(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> ReferenceKvCache:
        try:
            return ReferenceKvCache(layouts, num_blocks)
        except MemoryError:
            raise ConfigError(
                f"no memory for {sum(num_blocks)} KV blocks", hint="lower --kv-cache-memory-bytes"
            ) from None

    def allocate_on_demand(
        self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]
    ) -> OnDemandKvCache:
        return self.allocate(layouts, num_blocks)

    def close(self) -> None:
        """Nothing is held outside Python."""

    def _kv_layouts(self, program: Program) -> tuple[KvLayout, ...]:
        asked = self.options.kv_cache_dtype
        dtype = "fp64" if asked == "auto" else asked
        return tuple(layout_of(group, dtype) for group in program.groups)


def layout_of(group: CacheGroup, dtype: str = "fp64") -> KvLayout:
    """Returns the layout of a group whose numbers are kept as a type of `KV_TYPES`."""
    numbers = BLOCK_SIZE * group.num_kv_heads * KV_TYPES[dtype].itemsize
    return KvLayout(group, dtype, (numbers * group.k_width, numbers * group.v_width))


def _check_op(program: Program, op: Op) -> None:
    if type(op) not in FORMULAS:
        raise _refused(program, f"the op {op.kind}")
    if isinstance(op, Attention) and op.mask not in MASKS:
        raise _refused(program, f"attention with the mask {op.mask}")


def _refused(program: Program, what: str) -> BackendUnavailable:
    return BackendUnavailable(f"the reference backend cannot run {what} (in {program.name})")


def _load(weight: Weight, load: LoadWeight) -> Floats:
    array = load(weight).dequantize().astype(np.float64, order="C")
    if array.shape != weight.shape:
        raise WeightMismatch(f"{weight.name} has shape {array.shape}, expected {weight.shape}")
    return array
