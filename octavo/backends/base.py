"""What a backend is: it prepares a Program once, then runs it over a step's batch and the KV
blocks.

Knows Programs, packed weights, arrays. Knows nothing of requests, files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from octavo.backends.batch import DecodeSteps, GoesOn, SampleResult, StepBatch, StepOutput
from octavo.backends.kv import KvCache, KvLayout, OnDemandKvCache
from octavo.outputs import Profile
from octavo.program.program import Program, Weight
from octavo.quant.blocks import StoredWeight

LoadWeight = Callable[[Weight], StoredWeight]

FormatOf = Callable[[Weight], str]
"""How a weight is stored once it is loaded, by GGUF's names: F32, BF16, Q8_0, Q4_K ..."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What a backend needs to know of the engine's options."""

    dtype: str = "auto"
    """auto | float32 | bfloat16: what plain weights are computed in; packed weights say their own.
    """
    kv_cache_dtype: str = "auto"
    """auto (as products compute) | fp32 | bf16 | int8 | fp8 (both with a scale for each token and
    head).
    """
    shared_prefix_attention: bool = True
    """Requests whose block tables begin alike read those blocks together, where the backend can;
    the same results, bit for bit.
    """
    num_threads: int | None = None
    max_tokens: int = 2048
    """Rows of the largest step."""
    max_requests: int = 128
    max_context: int = 8192
    gpu_memory_utilization: float = 0.92
    """Share of a device's own memory that may be taken in all."""
    attention_backend: str = "auto"
    torch_kernels: str = "auto"
    enforce_eager: bool = False
    """Nothing is captured as a CUDA graph."""
    batch_invariant: bool = False
    """A row's numbers are the same bits in any company, on backends where that costs speed."""

    @property
    def max_rows(self) -> int:
        """Permanent ones: a request that has ended keeps its row while a step in flight computes
        it, beside those that took its place.
        """
        return 2 * self.max_requests


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a Program takes before it is prepared: bytes of each weight as packed, and of the
    buffers of the largest step.
    """

    weight_bytes: Mapping[Weight, int]
    step_bytes: int
    kv_layouts: tuple[KvLayout, ...]
    """By cache group."""
    code: str
    """In which most of the weights are packed, for `Backend.measure`."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that a machine gives: bytes per second from memory, operations per second of many
    rows' products.
    """

    bandwidth: float
    operations: float


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device's own, where weights and KV lie: what is taken, by name, and what the KV
    cache may have of the rest.
    """

    total_bytes: int
    parts: Mapping[str, int]
    kv_bytes: int


class Runnable(Protocol):
    """A prepared Program."""

    @property
    def kv_layouts(self) -> tuple[KvLayout, ...]:
        """Layout of each of the Program's cache groups, in their order."""
        ...

    def run(self, batch: StepBatch, kv: KvCache) -> StepOutput:
        """One step. A fault in one row's numbers is that row's (SampleResult.failed), never an
        exception.
        """
        ...

    @property
    def progress(self) -> int:
        """Changes as a step gets ahead; read by another thread while it runs."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    def start_profile(self) -> None:
        """Times each kind of op of the steps that follow; BackendUnavailable where the backend
        cannot.
        """
        ...

    def stop_profile(self) -> Profile: ...


class Computing(Protocol):
    """A step that is under way."""

    def result(self) -> StepOutput:
        """Waits for it; raises what computing it raised."""
        ...


@runtime_checkable
class AsyncRunnable(Protocol):
    """A Runnable that takes the next step before the one before has come back, and keeps the last
    token of each permanent row.
    """

    def launch(self, batch: StepBatch, kv: KvCache) -> Computing:
        """`run`, without waiting for the results. Steps are computed in order, and so is what `kv`
        is told between them.
        """
        ...


@runtime_checkable
class DecodingRunnable(Protocol):
    """A Runnable that computes several decode steps in one call."""

    def decode(
        self, batch: StepBatch, kv: KvCache, steps: DecodeSteps, goes_on: GoesOn
    ) -> list[SampleResult]:
        """Of each step computed, bitwise what `run` gives. Raises what the first one raises; a
        later one ends them instead.
        """
        ...


class Backend(Protocol):
    """A way to compute Programs."""

    name: str
    options: BackendOptions
    numerics: str
    """What, besides the options, the last bits of its numbers depend on: an instruction set, a
    library.
    """

    def prepare(self, program: Program, load: LoadWeight) -> Runnable:
        """Packs weights (each asked for once through `load`) and plans buffers; BackendUnavailable
        names an op it cannot run.
        """
        ...

    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        """What `prepare` would take, from the weights' formats alone. Asks not whether it can
        run."""
        ...

    def measure(self, num_bytes: int, code: str) -> Ceilings:
        """Of this machine, in some tenths of a second: reading so many bytes, multiplying weights
        of that code.
        """
        ...

    def allocate(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> KvCache:
        """Makes blocks 0 .. num_blocks[g] - 1 of each group g, zeroed lazily; ConfigError where
        memory does not suffice.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class DeviceBackend(Protocol):
    """A backend whose weights and KV may lie elsewhere than in the machine's memory."""

    def memory(self) -> DeviceMemory | None:
        """As it is now: once a Program is prepared, with what its largest step takes. None: it is
        the machine's.
        """
        ...


@runtime_checkable
class AsyncBackend(Protocol):
    """A backend whose prepared Programs are AsyncRunnables."""

    @property
    def computes_apart(self) -> bool:
        """On a device of its own, while Python goes on."""
        ...


@runtime_checkable
class OnDemandBackend(Protocol):
    """A backend whose KV memory may be given on demand."""

    def allocate_on_demand(
        self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]
    ) -> OnDemandKvCache:
        """Reserves addresses for the blocks, without memory; ConfigError where the system has too
        few.
        """
        ...
