"""The interface of a backend: it prepares a Program once, then runs it over batches and KV blocks.

Owns the protocols and the data classes of their arguments; the arrays of a step are in `batch.py`,
KV memory in `kv.py`. Knows Programs and packed weights, and nothing of requests, files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.api.outputs import Profile
from octavo.engine.protocol.step import WeightArrivals
from octavo.executor.batch import DecodedStep, DecodeSteps, StepBatch, StepOutput, Verify
from octavo.executor.kv import BlockRows, KvCache, KvLayout, OnDemandKvCache
from octavo.program.low_rank import Updates
from octavo.program.program import Program, Weight
from octavo.quant.blocks import StoredWeight

LoadWeight = Callable[[Weight], StoredWeight]

FormatOf = Callable[[Weight], str]
"""Tells how a weight is stored once it is loaded, by GGUF's names: F32, BF16, Q8_0, Q4_K ..."""


@dataclass(frozen=True, slots=True)
class WeightsOffDevice:
    """Weights that are streamed from a file while steps are computed."""

    memory_bytes: int
    """Most bytes of weights in memory."""
    directory: Path
    schedule: Literal["pinned", "layers"] = "pinned"
    fingerprint: str = ""
    """Name of the weights and of all that decides how they are packed; files of others are never
    read."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The engine's options that a backend depends on."""

    dtype: str = "auto"
    """Type that plain weights are computed in: auto, float32 or bfloat16; packed weights name their
    own."""
    kv_cache_dtype: str = "auto"
    """Type that K and V are kept in: auto (as products compute), fp32, bf16, int8 or fp8 (codes
    with a scale for each token and head)."""
    shared_prefix_attention: bool = True
    """Whether requests whose block tables begin alike read those blocks together, where the backend
    can; the results are the same, bit for bit."""
    num_threads: int | None = None
    max_tokens: int = 2048
    """Number of rows in the largest step."""
    max_requests: int = 128
    max_context: int = 8192
    gpu_memory_utilization: float = 0.92
    """Share of a device's own memory that may be taken in all, from 0 to 1."""
    attention_backend: str = "auto"
    torch_kernels: str = "auto"
    enforce_eager: bool = False
    """Whether decode steps are never captured as CUDA graphs."""
    offload: WeightsOffDevice | None = None
    """Place of the weights that are not all in memory; None: all are."""
    hooks: tuple[Any, ...] = ()
    """What extensions add to the backend; each backend knows the class of its own hooks."""
    batch_invariant: bool = False
    """Whether a row's bits never depend on its batch, on backends where that costs speed."""

    @property
    def max_rows(self) -> int:
        """Number of permanent rows. A finished request keeps its row while a step in flight
        computes it, beside the request that took its place.
        """
        return 2 * self.max_requests


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a Program will take, known before it is prepared."""

    weight_bytes: Mapping[Weight, int]
    step_bytes: int
    kv_layouts: tuple[KvLayout, ...]
    """Layout of each cache group."""
    code: str
    """Code that most of the weights are packed in, for `Backend.measure`."""
    memory_bytes: int | None = None
    """Bytes of weights in memory where the others are streamed; None: all are in memory."""
    streamed_bytes: int = 0
    """Bytes of weights that each step reads from a file."""
    least_memory_bytes: int = 0
    """Fewest bytes of weights in memory with which it could run; the others would be streamed."""
    read_in_part: Mapping[str, int] = field(default_factory=dict)
    """Bytes of streamed weights of which a step reads the parts that it uses, by what a part is."""
    row_products: Mapping[Weight, Hashable] = field(default_factory=dict)
    """Kind of product that reads each weight for one row: keys of `Ceilings.row_rates`."""
    row_attention: Hashable = None
    """Kind of attention that reads K and V for one row, for `Backend.measure`."""
    num_stages: int = 0
    """Stages of a step beside its products: attention, norms and the like."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights in memory."""
        whole = sum(self.weight_bytes.values())
        return whole if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Highest rates that a machine reaches: bytes a second read from memory, operations a second in
    products of many rows.
    """

    bandwidth: float
    operations: float
    disk: float | None = None
    """Bytes a second read from the disk of streamed weights; None where none are streamed or the
    rate is not known."""
    row_rates: Mapping[Hashable, float] = field(default_factory=dict)
    """Bytes a second at which products of one row read weights, by `Footprint.row_products`; those
    that are missing are read at `bandwidth`."""
    kv_rate: float | None = None
    """Bytes a second at which attention of single rows reads K and V; None: `bandwidth`."""
    stage_seconds: float = 0
    """Seconds that each of `Footprint.num_stages` takes beside what it reads."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device of its own: the parts taken, by name, and the rest that the KV cache may
    have, in bytes.
    """

    total_bytes: int
    parts: Mapping[str, int]
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class ObservedInputs:
    """Inputs of a Program's products over tokens, after their norms, as the last step had them."""

    num_rows: int
    """Most rows of a step."""
    inputs: dict[Weight, NDArray[np.float32]] = field(default_factory=dict)
    """Rows that are multiplied with each weight, `[num_rows, in]`; a step writes its first ones."""


class Runnable(Protocol):
    """A prepared Program."""

    @property
    def kv_layouts(self) -> tuple[KvLayout, ...]:
        """Layout of each of the Program's cache groups, in their order."""
        ...

    def run(self, batch: StepBatch, kv: KvCache) -> StepOutput:
        """Computes one step. A fault in one row's numbers is that row's (SampleResult.failed),
        never an exception.
        """
        ...

    @property
    def progress(self) -> int:
        """Counter that grows while a step is computed; another thread may read it."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    def start_profile(self) -> None:
        """Times each kind of op in the steps that follow; BackendUnavailable where the backend
        cannot.
        """
        ...

    def stop_profile(self) -> Profile: ...


class Computing(Protocol):
    """A step that has been launched."""

    def result(self) -> StepOutput:
        """Waits for the step's output; raises what computing it raised."""
        ...


@runtime_checkable
class AsyncRunnable(Protocol):
    """A Runnable that takes the next step before the last one has ended, and keeps the last token
    of each permanent row.
    """

    def launch(self, batch: StepBatch, kv: KvCache) -> Computing:
        """Starts what `run` does and returns at once. Steps are computed in order, and block moves
        of `kv` between them too.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter in a backend's own layout, in host memory."""

    num_bytes: int
    parts: Any


class AdapterSlots(Protocol):
    """The adapters that a prepared Program's rows may have (`StepBatch.adapter_rows`), by slot."""

    def pack(self, updates: Updates) -> PackedAdapter:
        """Lays an adapter out as the backend reads it; may be called in any thread."""
        ...

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """Takes an adapter into a slot, in place of what is there; no step is being computed."""
        ...

    def drop(self, slot: int) -> None:
        """Frees a slot; no step is being computed."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in slots."""
        ...


@runtime_checkable
class StreamingRunnable(Protocol):
    """A Runnable that may read weights from a file while it computes."""

    @property
    def arrivals(self) -> WeightArrivals | None:
        """Weights read so far; None where all are in memory."""
        ...


@runtime_checkable
class LayeredRunnable(Protocol):
    """A Runnable that says, while it computes, of which layers keys and values are written."""

    @property
    def kv_writes(self) -> Sequence[tuple[int, int]]:
        """The (group, layer) of each write of keys and values, in the order of a step."""
        ...

    @property
    def kv_written(self) -> tuple[int, int]:
        """Number of the newest step, which counts up, and how many of `kv_writes` it has done;
        another thread may read it, and then the bytes.
        """
        ...


@runtime_checkable
class AdapterRunnable(Protocol):
    """A Runnable whose Program has sites, which adapters may update."""

    @property
    def adapters(self) -> AdapterSlots: ...


@runtime_checkable
class JoiningRunnable(Protocol):
    """A Runnable that may be one of several engines' that share their experts."""

    def join(self, kv: KvCache) -> None:
        """Computes a step of no rows, whose experts compute those of other engines."""
        ...


@runtime_checkable
class VerifyingRunnable(Protocol):
    """A Runnable that has its draws checked, and draws again what does not hold."""

    max_verified: int
    """Most sampled rows of a step whose draws are checked."""
    max_forced_requests: int
    """Most requests of a step to whose texts tokens are added that nothing else may follow: with
    more, computing such a token in the same step costs what the step that it saves would.
    """

    def run_verified(self, batch: StepBatch, kv: KvCache, check: Verify) -> StepOutput:
        """Computes what `run` does, then draws rows again as `check` says."""
        ...


@runtime_checkable
class DecodingRunnable(Protocol):
    """A Runnable that computes several decode steps of one batch."""

    def decode(
        self, batch: StepBatch, kv: KvCache, steps: DecodeSteps, check: Verify | None
    ) -> Iterator[DecodedStep]:
        """Computes a step each time the iterator is advanced, bitwise as `run` does, or
        `run_verified` with a check.

        The step in which a request ends or fails is the last. A fault in the first step is raised;
        a fault in a later one ends the iterator before it.
        """
        ...


class Backend(Protocol):
    """A way to compute Programs: native, torch or reference."""

    name: str
    options: BackendOptions
    numerics: str
    """Name of what the last bits of results depend on besides the options: an instruction set, a
    library."""

    def check(self, program: Program, format_of: FormatOf) -> None:
        """Refuses what `prepare` cannot run, before any weight is read.

        BackendUnavailable names the op, the cache group or the pair of weights, UnsupportedModel
        the format.
        """
        ...

    def prepare(self, program: Program, load: LoadWeight) -> Runnable:
        """Packs the weights (each loaded once through `load`) and plans buffers; BackendUnavailable
        names an op that the backend cannot run.
        """
        ...

    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        """Predicts what `prepare` will take, from the weights' formats alone; it does not check
        whether the Program can run.
        """
        ...

    def measure(self, num_bytes: int, footprint: Footprint) -> Ceilings:
        """Measures this machine in about a second: reading `num_bytes` from memory, products of
        many rows with weights of the footprint's code, and of one row with each of its layouts.
        """
        ...

    def allocate(self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]) -> KvCache:
        """Makes blocks 0 .. num_blocks[g] - 1 of each group g, zeroed lazily; ConfigError where
        memory does not suffice.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class ObservingBackend(Protocol):
    """A backend that can show what its products multiply."""

    def prepare_observed(
        self, program: Program, load: LoadWeight
    ) -> tuple[Runnable, ObservedInputs]:
        """Does what `prepare` does, and has each step of more than a few rows fill the inputs."""
        ...


@runtime_checkable
class ProbingBackend(Protocol):
    """A backend that runs a part of a Program beside the whole, and says what blocks of one layer
    hold.
    """

    def prepare_with_part(
        self, program: Program, part: Program, load: LoadWeight, *, part_tokens: int
    ) -> tuple[Runnable, Runnable]:
        """Prepares a Program and a part of it, which has steps of `part_tokens` tokens at most and
        reads the same weights in memory.
        """
        ...

    def rows_of(self, layout: KvLayout, blocks: NDArray[np.uint8]) -> BlockRows:
        """Returns what `blocks [B, block_bytes]` hold, as `KvCache.read_block` gave them; of floats
        alone.
        """
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """A backend whose weights and KV may lie in a device's own memory."""

    def memory(self) -> DeviceMemory | None:
        """Reads the device's memory as it is now, with the largest step of each prepared Program
        reserved; None where weights lie in the machine's memory.
        """
        ...


@runtime_checkable
class AsyncBackend(Protocol):
    """A backend whose prepared Programs are AsyncRunnables."""

    @property
    def computes_apart(self) -> bool:
        """Whether steps are computed on a device of its own while Python goes on."""
        ...


@runtime_checkable
class OnDemandBackend(Protocol):
    """A backend that can reserve addresses for KV and take memory only where blocks are written."""

    def allocate_on_demand(
        self, layouts: Sequence[KvLayout], num_blocks: Sequence[int]
    ) -> OnDemandKvCache:
        """Reserves addresses for the blocks, without memory; ConfigError where the system has too
        few.
        """
        ...
