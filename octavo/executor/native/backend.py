"""The native backend: C++ kernels chosen for this machine, without PyTorch.

Owns compute threads, weight packing and KV layout, up to a prepared Program, which runs steps
(`native_program.py`). Design: csrc/plan/plan.h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.executor.base import (
    Backend,
    BackendOptions,
    Ceilings,
    Footprint,
    FormatOf,
    LoadWeight,
    ObservedInputs,
)
from octavo.executor.kv import BLOCK_SIZE, BlockRows, HeadRows, KvCache, KvLayout, OnDemandKvCache
from octavo.executor.native.check import check, check_ops
from octavo.executor.native.expert_records import ExpertRecords
from octavo.executor.native.extension import native_module, supported_levels
from octavo.executor.native.footprint import native_footprint
from octavo.executor.native.formats import PRODUCTS
from octavo.executor.native.hidden import with_hidden
from octavo.executor.native.lower import Lowering
from octavo.executor.native.native_hooks import (
    ExtensionRecords,
    NativeHooks,
    WeightRecords,
)
from octavo.executor.native.native_program import MANY_ROWS, NativeProgram, fatal_as_engine_dead
from octavo.executor.native.offload import OffloadedProgram, StreamedWeights, offload
from octavo.executor.native.ranks import EngineRanks, SharedMemoryRanks
from octavo.executor.native.row_rates import kv_rate, row_attention, row_rates, stage_seconds
from octavo.executor.native.states import StateBlocks
from octavo.executor.native.weights import NativeWeights
from octavo.executor.rank_grid import ALONE
from octavo.program.ops import Linear
from octavo.program.passes.expert_gates import fold_expert_gates
from octavo.program.passes.fuse import fuse
from octavo.program.passes.latents import absorb_latents
from octavo.program.passes.optimize import optimize
from octavo.program.program import CacheGroup, Op, Program, Weight
from octavo.utils.extensions import get_first

KV_DTYPES = ("auto", "fp32", "bf16", "int8", "k8v4", "int4")
KV_CODES = ("int8", "k8v4", "int4")
"""Stored types with a scale per token and head."""


def make_kv_layout(group: CacheGroup, dtype: str) -> KvLayout:
    """Returns the layout of a group stored as `dtype`, one of `KV_DTYPES` except auto.

    Convolution rows and recurrent states are always fp32. Keys and values of each kv head form a
    piece.
    """
    if group.kind in ("conv", "state"):
        dtype = "fp32"
    elif group.kind == "full" and not group.v_width and dtype in KV_CODES:
        dtype = "bf16"  # block summaries, by which keys are selected
    heads, *_ = shape = _get_group_shape(group, dtype)
    layer_bytes = native_module().kv_layer_bytes(*shape)
    pieces = (layer_bytes // heads,) * heads
    rows = HeadRows(group.num_layers, layer_bytes if group.kind == "state" else pieces[0])
    return KvLayout(group, dtype, pieces, (rows,))


def _get_group_shape(group: CacheGroup, dtype: str) -> tuple[int, int, int, str]:
    """Returns (number of heads, key width, value width, storage type) of a group.

    Convolution rows are stored as values without keys; a "head" of recurrent states is one part of
    them.
    """
    if group.kind == "conv":
        return (1, 0, group.k_width, dtype)
    if group.kind == "state":
        blocks = StateBlocks.of(group)
        return (blocks.num_parts, blocks.part_floats, 0, "states")
    return (group.num_kv_heads, group.k_width, group.v_width, dtype)


class NativeBackend(Backend):
    """The native backend at one instruction-set level: `level`, or the best available."""

    name = "native"
    observes_inputs = prepares_parts = allocates_on_demand = True

    def __init__(
        self,
        options: BackendOptions,
        *,
        level: str | None = None,
        ranks: SharedMemoryRanks | None = None,
        engines: EngineRanks | None = None,
    ) -> None:
        """`ranks` is set if several processes share the model, `engines` if several engines share
        its experts.
        """
        self._ranks = ranks
        self._engines = engines
        met = ranks if engines is None else engines.ranks
        self._grid = ALONE if met is None else met.grid
        if options.kv_cache_dtype not in KV_DTYPES:
            given_level = (
                f"kv_cache_dtype: got {options.kv_cache_dtype}, the native backend supports"
                f" {', '.join(KV_DTYPES)}"
            )
            raise BackendUnavailable(
                given_level, hint="use int8, which has the size of fp8 and higher accuracy"
            )
        self.options = options
        native = native_module()
        supported = supported_levels()
        if level is not None and level not in supported:
            raise BackendUnavailable(
                f"cpu_level {level!r}: this machine supports {', '.join(supported)}",
                hint="set cpu_level to auto",
            )
        kernels = Path(native.__file__).parent
        num_threads = options.num_threads or 1
        try:
            self._device = native.Device(
                num_threads, str(kernels), level or supported[-1], options.thread_groups
            )
        except (RuntimeError, MemoryError) as error:
            what = f"the native backend cannot start {num_threads} threads: {error}"
            raise BackendUnavailable(what, hint="use fewer --threads") from None
        self.numerics = self.level
        self._hooks: tuple[NativeHooks, ...] = options.hooks
        self._optimized: tuple[Program, Program] | None = None
        self._offloaded: OffloadedProgram | None = None

    @property
    def level(self) -> str:
        return str(self._device.level)

    def check(self, program: Program, format_of: FormatOf) -> None:
        optimized = self._optimize(program)
        formats = check(optimized, format_of, self._device.row_type, self._grid)
        for hooks in self._hooks:
            hooks.check(optimized, formats, self._device)
        if self.options.offload is not None:
            self.footprint(program, format_of)
            self._streamed(program).check()

    def prepare_program(self, program: Program, load: LoadWeight) -> NativeProgram:
        return self._prepare_program(program, load, self._weights(program, load))

    def prepare_observed_program(
        self, program: Program, load: LoadWeight
    ) -> tuple[NativeProgram, ObservedInputs]:
        observed = ObservedInputs(self.options.max_tokens)
        return self._prepare_program(
            program, load, self._weights(program, load), observed
        ), observed

    def prepare_program_with_part(
        self, program: Program, part: Program, load: LoadWeight, *, part_tokens: int
    ) -> tuple[NativeProgram, NativeProgram]:
        assert self.options.offload is None, "a part would read a file in an order of its own"
        weights = self._weights(program, load)
        whole = self._prepare_program(program, load, weights)
        return whole, self._prepare_program(part, load, weights, max_tokens=part_tokens)

    def _weights(self, program: Program, load: LoadWeight) -> NativeWeights:
        """Returns the weights of a Program, not loaded yet."""
        skipping = _skipping(self._optimize(program))
        by_columns = () if self.options.offload is not None else skipping
        return NativeWeights(self._device, load, self.options.dtype, by_columns=by_columns)

    def _prepare_program(
        self,
        program: Program,
        load: LoadWeight,
        weights: NativeWeights,
        observed: ObservedInputs | None = None,
        *,
        max_tokens: int | None = None,
    ) -> NativeProgram:
        optimized = self._optimize(program)
        check_ops(optimized, self._grid)
        native = native_module()
        builder = native.PlanBuilder(
            self._device,
            max_tokens or self.options.max_tokens,
            program.vocab_size,
            ranks=None if self._ranks is None else self._ranks.shared,
            engines=None if self._engines is None else self._engines.ranks.shared,
            num_engines=1 if self._engines is None else self._engines.num_engines,
        )
        streamed = None if self.options.offload is None else self._streamed(program)
        if streamed is not None:
            streamed.open(load, self.options.dtype, weights)
        get_chunk = _in_memory if streamed is None else streamed.get_chunk
        records = None if streamed is None else streamed.records
        if records is None and (packed := self._records(optimized)) is not None:
            records = packed.open_in_memory(self._device, load, self.options.dtype, weights)
        lowering = Lowering(
            optimized,
            builder,
            weights,
            get_chunk,
            observed,
            records=records,
            hooks=self._hooks,
        )
        plan = lowering.run()
        with fatal_as_engine_dead():
            runner = native.StepRunner(
                self._device,
                plan,
                stream=None if streamed is None else streamed.stream,
                share_prefixes=self.options.shared_prefix_attention,
            )
        weights.pack()
        products = [op for op in optimized.ops if isinstance(op, PRODUCTS)]
        computes_fp32 = all(weights.reads_fp32(op) for op in products)
        in_records = 0 if records is None else records.num_bytes
        return NativeProgram(
            self._device,
            runner,
            program,
            weights.num_bytes + in_records
            if self._offloaded is None
            else self._offloaded.memory_bytes,
            self._kv_layouts(program, computes_fp32=computes_fp32),
            sites=lowering.sites,
            streamed=streamed,
            ranks=self._ranks,
        )

    def _records(self, optimized: Program) -> ExtensionRecords | None:
        """Returns the weights of a Program that are stored in an extension's records."""
        return get_first(hooks.records(optimized) for hooks in self._hooks)

    def _records_in_file(
        self, optimized: Program, sizes: Mapping[Weight, int]
    ) -> WeightRecords | None:
        """Returns the weights that are stored in records of the file of streamed weights."""
        off_device, of_extension = self.options.offload, self._records(optimized)
        if off_device is None or off_device.schedule != "experts":
            return of_extension
        if of_extension is not None:
            raise ConfigError(
                "weights_schedule: got experts with options that compute some layers neuron by"
                " neuron, expected one of them",
                hint="use weights_schedule pinned",
            )
        return ExpertRecords(optimized, sizes, off_device.memory_bytes)

    def footprint(self, program: Program, format_of: FormatOf) -> Footprint:
        native = native_footprint(self._optimize(program), format_of, self.options.max_tokens)
        layouts = self._kv_layouts(program, computes_fp32=native.computes_fp32)
        plain = Footprint(
            native.weight_bytes,
            native.step_bytes,
            layouts,
            native.code,
            row_products=native.row_products,
            row_attention=row_attention(program, layouts),
            num_stages=native.num_stages,
        )
        if self.options.offload is None:
            return plain
        self._offloaded = planned = offload(
            self._optimize(program),
            native.weight_bytes,
            self.options.offload,
            self._records_in_file(self._optimize(program), native.weight_bytes),
        )
        records = planned.records
        return replace(
            plain,
            memory_bytes=planned.memory_bytes,
            streamed_bytes=planned.plan.step_bytes,
            least_memory_bytes=planned.least_memory_bytes,
            read_in_part={} if records is None else records.read_in_part,
        )

    def _streamed(self, program: Program) -> StreamedWeights:
        assert self.options.offload is not None
        assert self._offloaded is not None, "weights are planned by their formats, in `footprint`"
        return StreamedWeights(self._device, self._offloaded, self.options.offload, self.numerics)

    def measure(self, num_bytes: int, footprint: Footprint) -> Ceilings:
        return Ceilings(
            self._device.read_bandwidth(num_bytes),
            self._device.product_rate(footprint.code, MANY_ROWS),
            row_rates=row_rates(self._device, footprint.row_products.values(), num_bytes),
            kv_rate=kv_rate(self._device, footprint.row_attention, num_bytes),
            stage_seconds=stage_seconds(self._device, self.options.num_threads or 1),
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
            (layout.group.num_layers, *_get_group_shape(layout.group, layout.dtype), count)
            for layout, count in zip(layouts, num_blocks, strict=True)
        ]
        by_blocks = [group for group, layout in enumerate(layouts) if layout.in_file]
        try:
            memory: OnDemandKvCache = native_module().KvMemory(
                shapes, by_blocks, self.options.numa_nodes
            )
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
                f"the KV cache needs {needed} {what}, which the system cannot allocate", hint=hint
            ) from None
        for hooks in self._hooks:
            hooks.allocated(memory, layouts, num_blocks)
        return memory

    def get_block_rows(self, layout: KvLayout, blocks: NDArray[np.uint8]) -> BlockRows:
        return block_rows(layout, blocks)

    def close(self) -> None:
        """Does nothing: threads end with the last prepared program."""

    def _optimize(self, program: Program) -> Program:
        """Returns the optimized Program; caches the last one, because `prepare_program` follows
        `footprint`.
        """
        if self._optimized is None or self._optimized[0] is not program:
            keeps_rows = any(hooks.keeps_rows(program) for hooks in self._hooks)
            optimized = fuse(program) if keeps_rows else optimize(program)
            optimized = absorb_latents(fold_expert_gates(optimized))
            for hooks in self._hooks:
                optimized = hooks.optimize(optimized)
            self._optimized = (program, with_hidden(optimized))
        return self._optimized[1]

    def _kv_layouts(self, program: Program, *, computes_fp32: bool) -> tuple[KvLayout, ...]:
        """Returns a Program's KV layouts; dtype auto follows the precision of its matmuls."""
        asked = self.options.kv_cache_dtype
        dtype = asked if asked != "auto" else "fp32" if computes_fp32 else "bf16"
        if dtype in KV_CODES and any(group.kind == "latent" for group in program.groups):
            raise BackendUnavailable(
                "kv_cache_dtype: the native backend stores MLA latents as fp32 or bf16, got"
                f" {dtype}",
                hint="MLA latents are small compared with keys and values of all heads",
            )
        layouts: Sequence[KvLayout] = [make_kv_layout(group, dtype) for group in program.groups]
        for hooks in self._hooks:
            layouts = hooks.layouts(program, layouts)
        return tuple(layouts)


def _skipping(program: Program) -> set[Weight]:
    """Returns the weights of matmuls that may skip columns."""
    products = (op for op in program.ops if isinstance(op, Linear) and op.skips_zeros)
    return {weight for op in products for weight in op.weights_}


def _in_memory(op: Op) -> None:
    """`get_chunk` for weights in memory: no matmul waits for a chunk."""


def block_rows(layout: KvLayout, blocks: NDArray[np.uint8]) -> BlockRows:
    """Returns the keys and values in `blocks [B, block_bytes]` of one layer in fp32 or bf16.

    Layout: one piece per kv head, keys then values (`docs/concepts/kernels.md`).
    """
    group = layout.group
    assert group.num_layers == 1 and layout.dtype in ("fp32", "bf16"), "others are not asked for"
    numbers = _floats(blocks, layout.dtype).reshape(len(blocks), group.num_kv_heads, -1)
    num_keys = BLOCK_SIZE * group.k_width
    shape = (len(blocks), group.num_kv_heads)
    k, v = numbers[:, :, :num_keys], numbers[:, :, num_keys : num_keys + BLOCK_SIZE * group.v_width]
    if layout.dtype == "fp32":
        by_token = k.reshape(*shape, group.k_width, BLOCK_SIZE).swapaxes(2, 3)
        values = v.reshape(*shape, BLOCK_SIZE, group.v_width)
    else:
        pairs = k.reshape(*shape, group.k_width // 2, BLOCK_SIZE, 2)
        by_token = pairs.swapaxes(2, 3).reshape(*shape, BLOCK_SIZE, group.k_width)
        pairs = v.reshape(*shape, BLOCK_SIZE // 2, group.v_width, 2)
        values = pairs.swapaxes(3, 4).reshape(*shape, BLOCK_SIZE, group.v_width)
    return BlockRows(by_token.swapaxes(1, 2), values.swapaxes(1, 2))


def _floats(blocks: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    if dtype == "fp32":
        return np.ascontiguousarray(blocks).view(np.float32)
    wide = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32)
