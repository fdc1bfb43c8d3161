"""The interface of a backend: `Backend` prepares a Program once, `Runnable` runs it over batches.

The arrays of a step are in `batch.py`, KV memory in `kv.py`. Backends work on Programs and packed
weights; they are independent of requests, files and models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import BackendUnavailable
from octavo.api.outputs import Profile
from octavo.engine.protocol.step import WeightArrivals
from octavo.executor.batch import DecodedStep, DecodeSteps, StepBatch, StepOutput, Verify
from octavo.executor.kv import BlockRows, KvCache, KvLayout, OnDemandKvCache
from octavo.program.low_rank import Updates
from octavo.program.program import Program, Weight
from octavo.quant.blocks import StoredWeight

LoadWeight = Callable[[Weight], StoredWeight]

FormatOf = Callable[[Weight], str]
"""Returns how a weight is stored once it is loaded, by GGUF's names: F32, BF16, Q8_0, Q4_K ..."""


@dataclass(frozen=True, slots=True)
class WeightsOffDevice:
    """Weights that are streamed from a file while steps are computed."""

    memory_bytes: int
    """Largest number of bytes of weights in memory."""
    directory: Path
    schedule: Literal["pinned", "layers", "experts"] = "pinned"
    fingerprint: str = ""
    """Fingerprint of the weights and of everything that determines their packing; a file with a
    different fingerprint is never read.
    """


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Engine options that a backend depends on."""

    dtype: str = "auto"
    """Compute type of plain weights: auto, float32 or bfloat16. Packed weights have their own."""
    kv_cache_dtype: str = "auto"
    """Type of stored K and V: auto (the compute type of matmuls), fp32, bf16, or codes with a scale
    per token and head (int8, k8v4, int4, fp8).
    """
    shared_prefix_attention: bool = True
    """Whether requests whose block tables have a common prefix read its blocks together, if the
    backend supports it. Results are bitwise equal either way.
    """
    num_threads: int | None = None
    thread_groups: Sequence[Sequence[int]] = ()
    """CPUs of each group of threads that wait together (native); () for one group."""
    numa_nodes: Sequence[int] = ()
    """NUMA nodes of these groups, which divide the KV heads (native); () if the system shall place
    each page.
    """
    max_tokens: int = 2048
    """Number of rows in the largest step."""
    max_requests: int = 128
    max_context: int = 8192
    max_drafted: int = 0
    """Largest number of drafted tokens per request that a step verifies."""
    num_adapters: int = 0
    """Number of adapter slots."""
    max_adapter_rank: int = 0
    gpu_memory_utilization: float = 0.92
    """Fraction of a device's own memory that may be used in total, from 0 to 1."""
    attention_backend: str = "auto"
    torch_kernels: str = "auto"
    enforce_eager: bool = False
    """Whether decode steps are never captured as CUDA graphs."""
    offload: WeightsOffDevice | None = None
    """How weights are streamed if they are not all in memory; None: all weights are in memory."""
    hooks: tuple[Any, ...] = ()
    """Hooks of extensions; each backend uses the hooks of its own class."""
    batch_invariant: bool = False
    """Whether a row's bits never depend on its batch. Only matters for backends where this costs
    speed.
    """

    @property
    def max_rows(self) -> int:
        """Number of permanent rows. More than `max_requests`: a finished request keeps its row
        while an in-flight step still computes it, although another request has already replaced it.
        """
        return 2 * self.max_requests


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a Program will use, known before it is prepared."""

    weight_bytes: Mapping[Weight, int]
    step_bytes: int
    kv_layouts: tuple[KvLayout, ...]
    """Layout of each cache group."""
    code: str
    """Code in which most weights are packed, for `Backend.measure`."""
    memory_bytes: int | None = None
    """Bytes of weights in memory if the others are streamed; None: all are in memory."""
    streamed_bytes: int = 0
    """Bytes of weights that each step reads from a file."""
    least_memory_bytes: int = 0
    """Smallest number of bytes of weights in memory if the rest is streamed."""
    read_in_part: Mapping[str, int] = field(default_factory=dict)
    """Bytes of streamed weights of which a step reads only parts, by kind of part."""
    row_products: Mapping[Weight, Hashable] = field(default_factory=dict)
    """Kind of matmul that reads each weight for one row: keys of `Ceilings.row_rates`."""
    row_attention: Hashable = None
    """Kind of attention that reads K and V for one row, for `Backend.measure`."""
    num_stages: int = 0
    """Number of stages of a step other than matmuls, such as attention and norms."""

    @property
    def resident_bytes(self) -> int:
        whole = sum(self.weight_bytes.values())
        return whole if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Highest rates of a machine: memory bandwidth in bytes per second, and operations per second
    of matmuls of many rows.
    """

    bandwidth: float
    operations: float
    disk: float | None = None
    """Bytes per second read from the disk of streamed weights; None if none are streamed or the
    rate is unknown."""
    row_rates: Mapping[Hashable, float] = field(default_factory=dict)
    """Bytes per second at which matmuls of one row read weights, by `Footprint.row_products`;
    weights without an entry are read at `bandwidth`."""
    kv_rate: float | None = None
    """Bytes per second at which attention of single rows reads K and V; None: `bandwidth`."""
    stage_seconds: float = 0
    """Overhead of each of `Footprint.num_stages` in seconds."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device: the parts in use, by name, and the rest for the KV cache, in bytes."""

    total_bytes: int
    parts: Mapping[str, int]
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class ObservedInputs:
    """Inputs of a Program's matmuls over tokens in the last step, after their norms."""

    num_rows: int
    """Largest number of rows of a step."""
    inputs: dict[Weight, NDArray[np.float32]] = field(default_factory=dict)
    """Rows that each weight is multiplied with, `[num_rows, in]`; a step fills the first ones."""


class Computing(Protocol):
    """A launched step."""

    def result(self) -> StepOutput:
        """Waits for the step's output; raises any exception raised while computing it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter in a backend's own layout, in host memory."""

    num_bytes: int
    parts: Any


class AdapterSlots(Protocol):
    """Adapters of a prepared Program, by slot. `StepBatch.adapter_rows` names the slot of each
    row.
    """

    def pack(self, updates: Updates) -> PackedAdapter:
        """Converts an adapter to the backend's layout. Thread-safe."""
        ...

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Puts an adapter into a slot, replacing its previous adapter. Must not be called while a
        step is being computed.
        """
        ...

    def drop(self, slot: int) -> None:
        """Frees a slot. Must not be called while a step is being computed."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in slots."""
        ...


def make_unsupported_error(
    backend: str, text: str, *, hint: str = "use --backend native"
) -> BackendUnavailable:
    """Returns the error of an operation that only other backends implement."""
    return BackendUnavailable(f"the {backend} backend {text}", hint=hint)


class Runnable(ABC):
    """A prepared Program. Operations that only some backends implement raise BackendUnavailable by
    default; engine options that need them are rejected earlier.
    """

    backend_name: ClassVar[str]
    """`Backend.name` of the backend that prepared it."""
    kv_layouts: tuple[KvLayout, ...]
    """Layout of each of the Program's cache groups, in their order."""

    @abstractmethod
    def run(self, batch: StepBatch, kv: KvCache, verify: Verify | None = None) -> StepOutput:
        """Computes one step and resamples the rows that `verify` returns; `verify` requires
        `max_verified` > 0.

        A numerical failure in a row (such as NaN) fails only that row (`SampleResult.failed`); it
        is not raised.
        """

    @property
    @abstractmethod
    def progress(self) -> int:
        """Counter that grows while a step is computed; other threads may read it."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    def start_profile(self) -> None:
        """Starts timing each kind of op; raises BackendUnavailable if the backend cannot."""
        raise make_unsupported_error(
            self.backend_name,
            "does not support profiling ops",
            hint="profile with --backend native",
        )

    def stop_profile(self) -> Profile:
        raise BackendUnavailable("profiling was not started")

    @property
    def max_verified(self) -> int:
        """Largest number of sampled rows of a step that can be verified and resampled; 0: none."""
        return 0

    @property
    def max_forced_requests(self) -> int:
        """Largest number of requests of a step whose forced tokens are appended. With more
        requests, appending a forced token costs as much as the step that it saves.
        """
        return 1 << 30

    def decode(
        self, batch: StepBatch, kv: KvCache, steps: DecodeSteps, verify: Verify | None
    ) -> Iterator[DecodedStep]:
        """Computes one decode step each time the iterator is advanced, bitwise equal to `run`.

        Stops after the step in which a request ends or fails. An error in the first step is raised;
        an error in a later step ends the iterator before that step.
        """
        raise make_unsupported_error(self.backend_name, "computes one decode step per call")

    def launch(self, batch: StepBatch, kv: KvCache) -> Computing:
        """Starts a step and returns at once, on an asynchronous backend. Steps and block moves of
        `kv` are computed in order; the device keeps the last token of each permanent row.
        """
        raise make_unsupported_error(
            self.backend_name, "does not support asynchronous steps", hint="use --backend torch"
        )

    def join(self, kv: KvCache) -> None:
        """Computes a step without rows: its experts compute rows of other engines."""
        raise make_unsupported_error(self.backend_name, "does not share experts among engines")

    @property
    def adapters(self) -> AdapterSlots:
        """Slots of the adapters that may be applied to this Program."""
        raise make_unsupported_error(self.backend_name, "does not support adapters")

    @property
    def arrivals(self) -> WeightArrivals | None:
        """Weights read from files so far; None if all are in memory."""
        return None

    @property
    def num_late_compilations(self) -> int | None:
        """Kernels that this process compiled during steps, after the warm-up; each delays a
        step. None if kernels are not compiled at run time.
        """
        return None

    @property
    def kv_writes(self) -> Sequence[tuple[int, int]] | None:
        """(group, layer) of each write of keys and values, in the order of a step; None if the
        backend does not report them while it computes.
        """
        return None

    @property
    def kv_written(self) -> tuple[int, int]:
        """Number of the latest step, and how many of `kv_writes` it has completed. Another thread
        may read this and then the written bytes.
        """
        raise make_unsupported_error(self.backend_name, "does not report KV writes during a step")


class Backend(ABC):
    """A way to compute Programs: native, torch or reference."""

    name: ClassVar[str]
    options: BackendOptions
    numerics: str
    """Describes what the low-order bits of results depend on besides the options, such as the
    instruction set or a library.
    """
    observes_inputs: ClassVar[bool] = False
    """Whether `prepare_observed_program` works."""
    prepares_parts: ClassVar[bool] = False
    """Whether `prepare_program_with_part` and `get_block_rows` work."""
    allocates_on_demand: ClassVar[bool] = False
    """Whether `allocate_on_demand` works."""

    @property
    def has_own_device(self) -> bool:
        """Whether steps are computed on a separate device while Python continues."""
        return False

    @abstractmethod
    def check(self, program: Program, format_of: FormatOf) -> None:
        """Rejects what `prepare_program` cannot run, before any weight is read.

        Raises BackendUnavailable naming the op, cache group or pair of weights, or UnsupportedModel
        naming the weight format.
        """

    @abstractmethod
    def prepare_program(self, program: Program, load: LoadWeight) -> Runnable:
        """Packs the weights (each loaded once through `load`) and plans buffers. Raises
        BackendUnavailable naming an op that the backend cannot run.
        """

    @abstractmethod
    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        """Predicts the memory that `prepare_program` allocates, from the weights' formats only.
        Does not check whether the Program can run.
        """

    @abstractmethod
    def measure(self, num_bytes: int, footprint: Footprint) -> Ceilings:
        """Measures this machine in about a second: reads of `num_bytes` from memory, matmuls of
        many rows with weights in the footprint's code, and matmuls of one row in each of its
        layouts.
        """

    @abstractmethod
    def allocate(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> KvCache:
        """Allocates blocks 0 .. num_blocks[g] - 1 of each group g, zeroed lazily. Raises
        ConfigError if there is not enough memory.
        """

    def allocate_on_demand(
        self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]
    ) -> OnDemandKvCache:
        """Reserves addresses for blocks, without memory. Raises ConfigError if there are too few
        addresses.
        """
        raise make_unsupported_error(self.name, "has no virtual KV layout")

    def memory(self) -> DeviceMemory | None:
        """Reads the device's current memory, of which the largest step of each prepared Program is
        reserved. Returns None if weights are in host memory.
        """
        return None

    def prepare_observed_program(
        self, program: Program, load: LoadWeight
    ) -> tuple[Runnable, ObservedInputs]:
        """Prepares a Program so that each step of more than a few rows fills the inputs."""
        raise make_unsupported_error(self.name, "does not record matmul inputs")

    def prepare_program_with_part(
        self, program: Program, part: Program, load: LoadWeight, *, part_tokens: int
    ) -> tuple[Runnable, Runnable]:
        """Prepares a Program and a part of it, whose steps have at most `part_tokens` tokens. Both
        share the weights in memory.
        """
        raise make_unsupported_error(self.name, "does not prepare parts of Programs")

    def get_block_rows(self, layout: KvLayout, blocks: NDArray[np.uint8]) -> BlockRows:
        """Returns the keys and values of `blocks [B, block_bytes]`, as returned by
        `KvCache.read_block`; only for blocks stored as floats.
        """
        raise make_unsupported_error(self.name, "does not read KV blocks as floats")

    @abstractmethod
    def close(self) -> None: ...
