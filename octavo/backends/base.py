"""What a backend is: it prepares a Program once, then runs it over a step's batch and the KV blocks.

Knows Programs, packed weights, arrays. Knows nothing of requests, files or models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.outputs import Profile
from octavo.program.program import CacheGroup, Program, Weight
from octavo.quant.blocks import StoredWeight

BLOCK_SIZE = 16
"""Tokens in a KV block, everywhere: native kernels keep one block's keys in one vector."""

SPLIT_KEYS = 256
"""Keys in a split of the attention's definition (see ops.Attention)."""

LoadWeight = Callable[[Weight], StoredWeight]

FormatOf = Callable[[Weight], str]
"""How a weight is stored once it is loaded, by GGUF's names: F32, BF16, Q8_0, Q4_K ..."""


@dataclass(slots=True)
class SamplingBatch:
    """How to draw from each sampled row; C-contiguous arrays of length S (the step's sampled rows) unless said otherwise.

    `target_ids[s] >= 0` asks for that token's logprob instead of a draw (prompt logprobs). Sparse additions to the logits come as
    CSR: `bias_starts [S+1]`, `bias_ids`, `bias_values` (logit_bias; -inf bans). Penalties need the history: `history_starts [S+1]`,
    `history_ids`, `history_counts` (of generated tokens; 0 = in the prompt only). `allowed [S]` indexes `allowed_masks [A, V] bool`,
    -1 = all. Draws are Philox4x32-10 keyed by `seeds`, counter (position, sample_index, draw, 0).
    """

    temperatures: NDArray[np.float32]
    top_ks: NDArray[np.int32]
    top_ps: NDArray[np.float32]
    min_ps: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    sample_indices: NDArray[np.uint32]
    positions: NDArray[np.uint32]
    """Position of the token to be drawn."""
    target_ids: NDArray[np.int32]
    num_logprobs: NDArray[np.int32]
    """-1: none; otherwise the token's own logprob and rank, and so many top alternatives."""
    repetition_penalties: NDArray[np.float32]
    presence_penalties: NDArray[np.float32]
    frequency_penalties: NDArray[np.float32]
    history_starts: NDArray[np.int32]
    history_ids: NDArray[np.int32]
    history_counts: NDArray[np.int32]
    bias_starts: NDArray[np.int32]
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    allowed: NDArray[np.int32]
    allowed_masks: NDArray[np.bool_]


@dataclass(slots=True)
class SampleResult:
    """`token_ids [S]`: what was drawn (or the target). `failed [S]`: the row's logits held a NaN, its token means nothing.

    With logprobs asked for by any row: `logprobs [S]`, `ranks [S]` of the token, and `top_ids`, `top_logprobs [S, k]` for the
    largest k asked (best first; a row uses its own first k). They are of the raw logits, before bias, penalties and temperature.
    """

    token_ids: NDArray[np.int32]
    failed: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None = None
    ranks: NDArray[np.int32] | None = None
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None

    def part(self, first: int, end: int) -> SampleResult:
        """A view of the entries `first` .. `end` - 1."""
        part = SampleResult(self.token_ids[first:end], self.failed[first:end])
        for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
            array = getattr(self, name)
            setattr(part, name, None if array is None else array[first:end])
        return part


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Where a step's tokens come from and go to, on a device that keeps the last token of each permanent row.

    `sources [T]`: the row whose last token is taken in place of the id, -1: the id. `targets [S]`: the row whose last token the draw is
    from now on, -1: nobody's.
    """

    sources: NDArray[np.int32]
    targets: NDArray[np.int32]


@dataclass(slots=True)
class StepBatch:
    """One Program's inputs of one step. `T` rows of `R` requests, laid end to end; `G` cache groups; `S` sampled rows.

    All arrays are C-contiguous.

    A row whose slot is -1 in every group is padding: nobody reads what it computes, and it may hold NaN.
    """

    token_ids: NDArray[np.int32]
    """[T]"""
    positions: NDArray[np.int32]
    """[P, T]; P = 1 but for families with several position axes."""
    query_starts: NDArray[np.int32]
    """[R+1]: request r owns the rows query_starts[r] .. query_starts[r+1]."""
    context_lens: NDArray[np.int32]
    """[G, R]: keys of the request in the group once this step's are written."""
    slots: NDArray[np.int32]
    """[G, T]: block id * 16 + offset, or -1."""
    block_tables: NDArray[np.int32]
    """[G, R, B], padded with -1."""
    sample_rows: NDArray[np.int32]
    """[S]: rows whose logits are wanted; a row may stand more than once. S is 0 in a step that is all prefill."""
    sampling: SamplingBatch | None = None
    """None: the outputs come back as arrays and nothing is drawn."""
    hidden: NDArray[np.float32] | None = None
    """[T, W], for Programs whose input is "hidden"."""
    adapter_rows: NDArray[np.int32] | None = None
    last_tokens: LastTokens | None = None
    """None: every id is known here."""


@dataclass(slots=True)
class StepOutput:
    """`samples` where the batch asked for draws; otherwise the Program's named outputs, `[S, V]` logits in float32 or float64."""

    samples: SampleResult | None = None
    arrays: dict[str, NDArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What a backend needs to know of the engine's options."""

    dtype: str = "auto"
    """auto | float32 | bfloat16: what plain weights are computed in; packed weights say their own."""
    kv_cache_dtype: str = "auto"
    """auto (as products compute) | fp32 | bf16 | int8 | fp8 (both with a scale for each token and head)."""
    shared_prefix_attention: bool = True
    """Requests whose block tables begin alike read those blocks together, where the backend can; the same results, bit for bit."""
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
        """Permanent ones: a request that has ended keeps its row while a step in flight computes it, beside those that took its place."""
        return 2 * self.max_requests


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Bytes of a block of one cache group: all layers of the group together are `num_layers * layer_bytes`."""

    layer_bytes: int
    num_layers: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        return self.layer_bytes * self.num_layers


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a Program takes before it is prepared: bytes of each weight as packed, and of the buffers of the largest step."""

    weight_bytes: Mapping[Weight, int]
    step_bytes: int
    kv_layouts: tuple[KvLayout, ...]
    """By cache group."""
    code: str
    """In which most of the weights are packed, for `Backend.measure`."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that a machine gives: bytes per second from memory, operations per second of many rows' products."""

    bandwidth: float
    operations: float


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device's own, where weights and KV lie: what is taken, by name, and what the KV cache may have of the rest."""

    total_bytes: int
    parts: Mapping[str, int]
    kv_bytes: int


class KvCache(Protocol):
    """KV bytes of one backend, made by `allocate`; opaque but for whole blocks."""

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copies one block of a group in every layer."""
        ...

    def read_block(self, group: int, block_id: int, into: NDArray[np.uint8]) -> None:
        """One block's bytes in every layer, `[KvLayout.block_bytes]`."""
        ...

    def write_block(self, group: int, block_id: int, data: NDArray[np.uint8]) -> None:
        """What `read_block` gave, into any block of the same group."""
        ...


class BlockMover(Protocol):
    """Copies blocks of a group in batches, perhaps while steps compute; as if all were done in the order in which it is asked for."""

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, target) on the device; no target is another's source."""
        ...

    def read(self, group: int, block_ids: Sequence[int], into: Sequence[NDArray[np.uint8]]) -> None:
        """`KvCache.read_block` of each; the host has it after `settle`, and a later `write` from the same memory has it at once."""
        ...

    def write(self, group: int, block_ids: Sequence[int], data: Sequence[NDArray[np.uint8]]) -> None:
        """`KvCache.write_block` of each."""
        ...

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """So that the device reads and writes this memory by itself, as long as it lives."""
        ...

    def settle(self) -> float:
        """Until the host has what was read; the seconds that were spent copying since the last time, 0 where nobody has measured."""
        ...


@runtime_checkable
class BatchedKvCache(Protocol):
    """A KvCache whose blocks are copied in batches."""

    @property
    def copies(self) -> BlockMover: ...


class OnDemandKvCache(KvCache, Protocol):
    """One whose blocks get memory when they are written and give it back when they are told to, in whole pages."""

    def give_back(self, group: int, first_block: int, num_blocks: int) -> None:
        """What these neighbouring blocks hold is lost. Pages that reach beyond them stay."""
        ...

    def spans(self, group: int) -> Sequence[tuple[int, int]]:
        """Addresses and sizes in bytes of a group's blocks, so that one can see what the system has given."""
        ...


class Runnable(Protocol):
    """A prepared Program."""

    def run(self, batch: StepBatch, kv: KvCache) -> StepOutput:
        """One step. A fault in one row's numbers is that row's (SampleResult.failed), never an exception."""
        ...

    @property
    def progress(self) -> int:
        """Changes as a step gets ahead; read by another thread while it runs."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    def start_profile(self) -> None:
        """Times each kind of op of the steps that follow; BackendUnavailable where the backend cannot."""
        ...

    def stop_profile(self) -> Profile: ...


class Computing(Protocol):
    """A step that is under way."""

    def result(self) -> StepOutput:
        """Waits for it; raises what computing it raised."""
        ...


@runtime_checkable
class AsyncRunnable(Protocol):
    """A Runnable that takes the next step before the one before has come back, and keeps the last token of each permanent row."""

    def launch(self, batch: StepBatch, kv: KvCache) -> Computing:
        """`run`, without waiting for the results. Steps are computed in order, and so is what `kv` is told between them."""
        ...


GoesOn = Callable[[SampleResult], bool]
"""Told what a decode step drew after which there is to be another; False: there is not."""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Several steps of a batch in which each request has one row and draws from it: the drawn token is its next row.

    They end early where a request draws a token that ends it or fails. Block tables reach to the last step.
    """

    num_steps: int
    end_starts: NDArray[np.int32]
    """[R+1]: the tokens end_ids[end_starts[r] .. end_starts[r+1]) end request r."""
    end_ids: NDArray[np.int32]


@runtime_checkable
class DecodingRunnable(Protocol):
    """A Runnable that computes several decode steps in one call."""

    def decode(self, batch: StepBatch, kv: KvCache, steps: DecodeSteps, goes_on: GoesOn) -> list[SampleResult]:
        """Of each step computed, bitwise what `run` gives. Raises what the first one raises; a later one ends them instead."""
        ...


class Backend(Protocol):
    """A way to compute Programs."""

    name: str
    options: BackendOptions
    numerics: str
    """What, besides the options, the last bits of its numbers depend on: an instruction set, a library."""

    def prepare(self, program: Program, load: LoadWeight) -> Runnable:
        """Packs weights (each asked for once through `load`) and plans buffers; BackendUnavailable names an op it cannot run."""
        ...

    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        """What `prepare` would take, from the weights' formats alone. Asks not whether it can run."""
        ...

    def measure(self, num_bytes: int, code: str) -> Ceilings:
        """Of this machine, in some tenths of a second: reading so many bytes, multiplying weights of that code."""
        ...

    def kv_layout(self, group: CacheGroup) -> KvLayout: ...

    def allocate(self, groups: tuple[CacheGroup, ...], num_blocks: Sequence[int]) -> KvCache:
        """Blocks 0 .. num_blocks[g] - 1 of each group g, zeroed lazily. ConfigError where memory does not suffice."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DeviceBackend(Protocol):
    """A backend whose weights and KV may lie elsewhere than in the machine's memory."""

    def memory(self) -> DeviceMemory | None:
        """As it is now: once a Program is prepared, with what its largest step takes. None: it is the machine's."""
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

    def kv_pieces(self, group: CacheGroup) -> tuple[int, ...]:
        """Sizes of the pieces of a block in one layer; the same piece of the next block lies behind it."""
        ...

    def allocate_on_demand(self, groups: tuple[CacheGroup, ...], num_blocks: Sequence[int]) -> OnDemandKvCache:
        """Addresses for so many blocks, and no memory yet. ConfigError where the system has not so many."""
        ...
